"""This project's library, `specdec.LLM`, without a server, as a process that `benchmarks.peers` measures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from benchmarks.peers.child import Generate, Loaded, Setup, answer
from specdec import LLM

FIXED = (4, 8, 16)


def load(setup: Setup) -> Loaded:
    """Load the models; return variants: no draft, drafts of adaptive and of fixed lengths, and prompt lookup."""
    settings: dict[str, Any] = {
        "dtype": setup.dtype,
        "threads": 1,
        "batch": setup.num_streams,
        "sequence_length": setup.length,
        "prefix_caching": False,
    }
    adaptive = LLM(setup.target, setup.draft, **settings)
    fixed = LLM(setup.target, setup.draft, adaptive_gamma=False, **settings)
    lookup = LLM(setup.target, "ngram", **settings)
    variants: dict[str, Generate] = {
        "plain": partial(_generate, adaptive, gamma=0),
        "draft, as many as pay": partial(_generate, adaptive),
        **{f"draft {gamma}": partial(_generate, fixed, gamma=gamma) for gamma in FIXED},
        "prompt lookup": partial(_generate, lookup),
    }
    return Loaded(variants, {name: version(name) for name in ("onnxruntime", "numpy")})


def _generate(llm: LLM, prompts: Sequence[list[int]], num_tokens: int, **parameters: Any) -> list[tuple[int, ...]]:
    results = llm.generate(prompts, max_new_tokens=num_tokens, ignore_eos=True, **parameters)
    return [tuple(result.token_ids) for result in results]


if __name__ == "__main__":
    answer(load)
