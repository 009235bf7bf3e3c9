"""Benchmark of this project's choice of tokens on vLLM's runner V1, and of an argmax: `python -m benchmarks.choice`.

Each request has 8 draft tokens, and therefore 9 rows of logits. The logits are on the GPU if there is one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.report import print_json, print_table
from benchmarks.timing import interleaved
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.vllm.runner_v1 import chosen, extra_args, turn_of

GAMMA = 8
SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.8),
    "and top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "and top_k": SamplingParams(temperature=0.8, top_p=0.95, top_k=40),
    "and a penalty": SamplingParams(temperature=0.8, presence_penalty=0.5),
}


def main() -> None:
    args = _parser().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for count in map(int, args.requests.split(",")):
        logits = torch.randn(count * (GAMMA + 1), args.vocab_size, device=device)
        ways = {name: partial(_choose, sampling, logits) for name, sampling in SAMPLINGS.items()}
        times = interleaved({"argmax": partial(_argmax, logits), **ways}, rounds=args.rounds, seconds=args.seconds)
        rows.append([str(len(logits)), *(f"{each.median:.2f}" for each in times.values())])
    print_table(f"ms for rows of {args.vocab_size} tokens on {device}", ["rows", "argmax", *SAMPLINGS], rows)
    print_json("choice", rows)


def _argmax(logits: torch.Tensor) -> list[int]:
    token_ids: list[int] = logits.argmax(-1).tolist()
    return token_ids


def _choose(sampling: SamplingParams, logits: torch.Tensor) -> Sequence[object]:
    """Choose a token for each row of logits; the requests are new, so that penalties count all of their tokens."""
    prompt, proposal = tuple(range(64)), tuple(range(GAMMA))
    count = len(logits) // (GAMMA + 1)
    asked = extra_args(GenerationRequest(prompt, sampling, 64), "0", GAMMA)
    return chosen([turn_of(prompt, proposal, asked)] * count, logits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    parser.add_argument("--vocab_size", type=int, default=151_936, help="%(default)s")
    parser.add_argument("--requests", default="1,8", help="%(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit for each number of requests (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
