"""Program that prints the texts of one vLLM engine on model runner V2, for tests of the plug-in `vllm_same_text`.

Its argument is a JSON object: `model`, `speculative` (vLLM's speculative configuration, or null), `names` of modes,
`prompts` (their number), `num_tokens`, `options` of vLLM, `variants` (ways to draw and accept tokens, the plug-in's or
wrong ones, each of which runs all modes), `is_async`, and `mixed` (all modes in one batch). The last line that it
prints is the result, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

MODES: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 5},
    "large seed": {"temperature": 1.0, "seed": 2**62 + 3},
    "truncated": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 77},
    "min_p": {"temperature": 1.2, "min_p": 0.05, "seed": 78},
    "penalties": {
        "temperature": 0.7,
        "seed": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "bias": {"temperature": 1.0, "seed": 10, "logit_bias": {5: 3.0, 7: -4.0}, "min_tokens": 4},
    "hot": {"temperature": 2.0, "seed": 11},
    "log-probabilities": {"temperature": 0.8, "seed": 12, "logprobs": 2},
    "regex": {"temperature": 1.0, "seed": 13, "regex": "([a-f]{2,5} ){3,6}[0-9]{4}"},
    "JSON schema": {
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": 14,
        "json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
"""Sampling parameters by mode; the seed of a mode's n-th prompt, from 0 on, is larger by n."""
AS_INSTALLED = "as installed"
"""Name of the variant that leaves vLLM as it is after its start, with the plug-ins that it has found itself."""
PROMPTS = ("The quick brown fox", "1, 2, 3, 4, 5, 6,", "Once upon a time", "a b c d e f g h")
COUNTS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:num_preemptions": "preempted",
}
"""Names of vLLM's counters, each with its name in the results."""


def sampling(mode: str, number: int, num_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields = dict(MODES[mode])
    grammar = {kind: fields.pop(kind) for kind in ("regex", "json") if kind in fields}
    if "seed" in fields:
        fields["seed"] += number
    if grammar:
        fields["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(max_tokens=num_tokens, ignore_eos=not grammar, **fields)


def unseeded(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True)


def generated(llm: Any, asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Answer the prompts in all modes, such as "greedy"; return by mode its texts and counts of draft tokens.

    Args:
        llm: vLLM's engine.
        asked: argument of this program. If its "mixed" is true, the requests of all modes are one batch, and each mode
            has the counts of the batch.

    Returns:
        By mode, "texts", "drafted", "accepted" and "preempted". Each text is a pair: its token ids, and for each
        position the sorted ids of the tokens whose log-probabilities were given.
    """
    jobs = [(mode, number) for mode in asked["names"] for number in range(asked["prompts"])]
    batches = [jobs] if asked["mixed"] else [[job for job in jobs if job[0] == mode] for mode in asked["names"]]
    found: dict[str, dict[str, Any]] = {mode: {"texts": []} for mode in asked["names"]}
    for batch in batches:
        prompts = [PROMPTS[number % len(PROMPTS)][number // len(PROMPTS) :] for _, number in batch]
        params, before = [sampling(mode, number, asked["num_tokens"]) for mode, number in batch], counts(llm)
        if asked["mixed"]:
            prompts, params = [*prompts, PROMPTS[0]], [*params, unseeded(asked["num_tokens"])]
        for (mode, _), answer in zip(batch, llm.generate(prompts, params, use_tqdm=False), strict=False):
            output = answer.outputs[0]
            ranked = [sorted(step) for step in output.logprobs or ()]
            found[mode]["texts"].append([list(output.token_ids), ranked])
        for mode in {mode for mode, _ in batch}:
            found[mode] |= {name: number - before[name] for name, number in counts(llm).items()}
    return found


def counts(llm: Any) -> dict[str, int]:
    found = dict.fromkeys(COUNTS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTS:
            found[COUNTS[metric.name]] += metric.value
    return found


def force_async() -> None:
    """Keep vLLM's CPU platform from turning async scheduling off, and turn it on."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def kept(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(kept)


def one_off(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrong version of the plug-in's verification, `rule`: it uses the random numbers of the next position."""
    return lambda *given, **named: rule(*given[:4], given[4] + 1, *given[5:], **named)


def early(draft: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrong version of the plug-in's drafting, `draft`: it uses the random numbers of the next position.

    So texts stay, but fewer draft tokens are accepted.
    """
    return lambda self, hidden, at, *given, **named: draft(self, hidden, at + 1, *given, **named)


def believing(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrong version of the plug-in's verification, `rule`: it accepts every draft token."""

    def believe(*given: Any, **named: Any) -> Any:
        import torch

        tokens, _ = rule(*given, **named)
        ends, num_rows = given[3], given[3].diff().int()
        places = torch.arange(tokens.shape[1])
        drafts = given[2][torch.minimum(ends[:-1, None] + places + 1, ends[1:, None] - 1)]
        return tokens.where(places >= num_rows[:, None] - 1, drafts.to(tokens.dtype)), num_rows

    return believe


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Let vLLM draw and accept tokens by the variant `name` while the block runs.

    All variants but "as installed", which leaves vLLM as it is, are wrong in some way.
    """
    import triton.language as tl
    from vllm.v1.worker.gpu.sample import gumbel
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils, speculator

    import vllm_same_text

    drafting, stock = speculator.DraftModelSpeculator, rejection_sampler_utils.rejection_sample
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))  # the interpreter has no other
    before = rejection_sampler.rejection_sample, drafting.sample_draft
    unsalted = stock_draft(lambda *given, **named: gumbel.gumbel_sample(*given, **named | {"is_drafting": False}))
    ratio = lambda logits, _, *given, **named: stock(logits, None, *given, **named)  # noqa: E731
    rules = {
        AS_INSTALLED: before,
        "salt removed": (stock, unsalted),
        "ratio with shared noise": (ratio, vllm_same_text.sample_draft),
        "one position off": (one_off(vllm_same_text.choose), vllm_same_text.sample_draft),
        "drafts one position off": (vllm_same_text.choose, early(vllm_same_text.sample_draft)),
        "drafts believed": (believing(vllm_same_text.choose), vllm_same_text.sample_draft),
    }
    rejection_sampler.rejection_sample, drafting.sample_draft = rules[name]
    try:
        yield
    finally:
        rejection_sampler.rejection_sample, drafting.sample_draft = before


def stock_draft(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's own drafting with `sample` in place of `gumbel_sample`; it keeps the logits for acceptance."""

    def draw(self: Any, hidden: Any, at: Any, slots: Any, temperature: Any, seeds: Any, step: Any, cache: Any) -> Any:
        logits, kept = self.compute_draft_logits(hidden, 0), {"logits_cache": cache, "logits_cache_col": step}
        return sample(logits, slots, temperature, seeds, at, apply_temperature=True, is_drafting=True, **kept)

    return draw


def main() -> None:
    from vllm import LLM

    asked: dict[str, Any] = {
        "names": list(MODES),
        "prompts": 4,
        "num_tokens": 24,
        "options": {},
        "variants": [AS_INSTALLED],
    }
    asked |= {"is_async": False, "mixed": False, "speculative": None} | json.loads(sys.argv[1])
    if asked["is_async"]:
        force_async()
    small: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 32}
    small |= {"num_gpu_blocks_override": 40, "dtype": "float32", "enforce_eager": True, "seed": 0} | asked["options"]
    drafts = {"speculative_config": asked["speculative"]} if asked["speculative"] else {}
    llm = LLM(asked["model"], disable_log_stats=False, **small, **drafts)
    results = {}
    for name in asked["variants"]:
        with variant(name):
            results[name] = generated(llm, asked)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
