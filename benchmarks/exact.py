"""Price of `--exact`: `python -m benchmarks.exact [--device cuda] [--dtype bfloat16] [--model DIR]`.

Times passes of several sessions, with and without, over one token each (plain decoding) and over `--gamma` more
(verification), after 128 positions; then a prompt. Medians of runs that take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import print_json, print_table
from benchmarks.timing import interleaved
from specdec.inference.backends.registry import load_backend
from specdec.inference.config import BUNDLED_TARGET, ModelConfig
from specdec.inference.model.slots import Backend, Span

SESSIONS = (1, 4, 8, 16)
PAST, PROMPT = 128, 512
MODES = ("never", "always")


def main() -> None:
    args = _parser().parse_args()
    backends = {mode: load_backend(_config(args, mode)) for mode in MODES}
    for backend in backends.values():
        backend.forward([Span(slot, 0, _ids(PAST), 0) for slot in range(backend.num_slots)])
    times = {
        f"{count} sessions, {width} tokens each": _times(args, backends, partial(_pass, count=count, width=width))
        for count in (each for each in SESSIONS if each <= args.batch)
        for width in (1, args.gamma + 1)
    }
    prompt = min(PROMPT, min(backend.max_length for backend in backends.values()) - PAST)
    times[f"a prompt of {prompt} tokens"] = _times(args, backends, partial(_pass, count=1, width=prompt, num_logits=1))
    rows = [
        [name, *(f"{taken[mode]:.2f}" for mode in MODES), f"{taken['always'] / taken['never']:.2f}"]
        for name, taken in times.items()
    ]
    engine = f"{args.backend}/{args.dtype} on {args.device}"
    title = f"{args.model.name}, {engine}, {args.batch} slots, {args.threads} threads"
    print_table(title, ["pass", *(f"--exact {mode}, ms" for mode in MODES), "ratio"], rows)
    print_json("exact", {**{name: str(value) for name, value in vars(args).items()}, "ms": times})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact", description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED_TARGET, help="%(default)s")
    parser.add_argument("--backend", default="torch", help="torch, or onnx in float32 (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="%(default)s")
    parser.add_argument("--device", default="cpu", help="%(default)s")
    parser.add_argument("--batch", type=int, default=16, help="slots (%(default)s)")
    parser.add_argument("--gamma", type=int, default=4, help="draft tokens of a verifying pass (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="%(default)s")
    return parser


def _config(args: argparse.Namespace, mode: str) -> ModelConfig:
    where = {"backend": args.backend, "dtype": args.dtype, "device": args.device, "num_threads": args.threads}
    return ModelConfig(args.model, exact=mode, num_slots=args.batch, **where)


def _times(
    args: argparse.Namespace, backends: Mapping[str, Backend], run: Callable[[Backend], None]
) -> dict[str, float]:
    """Return the median milliseconds of `run` for each mode of `--exact`; the backends take turns."""
    variants = {mode: partial(run, backend) for mode, backend in backends.items()}
    return {mode: taken.median for mode, taken in interleaved(variants, rounds=args.rounds).items()}


def _pass(backend: Backend, *, count: int, width: int, num_logits: int = 0) -> None:
    spans = [Span(slot, PAST, _ids(width), num_logits or width) for slot in range(count)]
    logits: Any = backend.forward(spans)
    if isinstance(logits, torch.Tensor) and logits.is_cuda:
        torch.cuda.synchronize()


def _ids(width: int) -> list[int]:
    return [(index * 7919 + 13) % 2000 for index in range(width)]


if __name__ == "__main__":
    main()
