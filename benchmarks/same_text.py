"""Benchmark of the plug-in `vllm_same_text`: seeded texts that differ, and tokens/s beside vLLM's own speculation.

Run it in vLLM's environment, with the plug-in installed (`pip install ./vllm_same_text`), as
`python -m benchmarks.same_text --model TARGET --speculative_config JSON`. Each way to serve has its own process. Equal
logits give equal texts; in 16 bits the bits of logits follow from the width of a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.report import print_json, print_table

TEMPERATURES = (0.0, 0.7, 1.0)
PROMPT = "Number {}: write a long story about a sea, a city and a lost letter."
PLAIN, DEFAULT, OURS = "no speculation", "vLLM's rule", "same_text"
INVARIANT = "batch-invariant"
WAYS: Mapping[str, Mapping[str, str]] = {
    PLAIN: {},
    DEFAULT: {"SAME_TEXT": "0"},
    OURS: {},
    f"{PLAIN}, {INVARIANT}": {"VLLM_BATCH_INVARIANT": "1"},
    f"{OURS}, {INVARIANT}": {"VLLM_BATCH_INVARIANT": "1"},
}
"""Ways to serve, by name, each with the environment variables that its process gets."""


def main() -> None:
    args = parser().parse_args()
    if args.way:
        print(json.dumps(measured(args)))
        return
    found = {way: _in_a_process(way) for way in WAYS}
    results = {way: each for way, each in found.items() if each is not None}
    if lacking := [way for way in WAYS if way not in results]:
        print(f"Not run, as the log says: {'; '.join(lacking)}.")
    title = f"tokens/s of {args.streams} streams, and texts of {args.tokens} tokens that differ from no speculation"
    print_table(title, ["way", *(f"T {each:g}" for each in TEMPERATURES), "differ"], rows(results))
    print_json("same_text", {way: {t: each[t]["rate"] for t in each} for way, each in results.items()})
    sys.exit(0 if results else 1)


def rows(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Return table rows: tokens/s, and how many texts differ from those of the same way without speculation."""
    table = []
    for way, each in results.items():
        right = results.get(f"{PLAIN}, {INVARIANT}" if way.endswith(INVARIANT) else PLAIN, each)
        pairs = [pair for at in each for pair in zip(each[at]["texts"], right[at]["texts"], strict=True)]
        differ = f"{sum(a != b for a, b in pairs)} of {len(pairs)}"
        table.append([way, *(f"{each[str(at)]['rate']:.1f}" for at in TEMPERATURES), differ])
    return table


def measured(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run one way to serve; return tokens per second ("rate") and the texts' token ids ("texts"), by temperature."""
    from vllm import LLM, SamplingParams

    drafts = {} if args.way.startswith(PLAIN) else {"speculative_config": json.loads(args.speculative_config)}
    llm = LLM(
        args.model, dtype=args.dtype, max_model_len=args.tokens + 64, seed=0, **drafts, **json.loads(args.options)
    )
    prompts, found = [PROMPT.format(number) for number in range(args.streams)], {}
    llm.generate(prompts, SamplingParams(temperature=0.7, seed=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    for at in TEMPERATURES:
        ends: dict[str, Any] = {"temperature": at, "max_tokens": args.tokens, "ignore_eos": True}
        params, began = [SamplingParams(seed=number, **ends) for number in range(args.streams)], time.monotonic()
        texts = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]
        found[str(at)] = {"rate": args.streams * args.tokens / (time.monotonic() - began), "texts": texts}
    return found


def _in_a_process(way: str) -> dict[str, dict[str, Any]] | None:
    """Run this program for one way to serve; return what it measured, None if it failed; its log goes to stderr."""
    command = [sys.executable, "-m", "benchmarks.same_text", *sys.argv[1:], "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **WAYS[way]}, check=False)
    if done.returncode != 0:
        return None
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def parser() -> argparse.ArgumentParser:
    built = argparse.ArgumentParser(prog="python -m benchmarks.same_text", description=__doc__)
    built.add_argument("--model", required=True, help="directory or hub id of the target")
    built.add_argument(
        "--speculative_config", required=True, metavar="JSON", help="vLLM's own: eagle3, mtp, draft_model"
    )
    built.add_argument("--dtype", default="bfloat16", help="%(default)s")
    built.add_argument("--tokens", type=int, default=1000, help="of a text (%(default)s)")
    built.add_argument("--streams", type=int, default=16, help="texts at once (%(default)s)")
    built.add_argument("--options", default="{}", metavar="JSON", help="more options of vLLM's LLM")
    built.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return built


if __name__ == "__main__":
    main()
