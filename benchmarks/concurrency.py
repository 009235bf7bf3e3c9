"""Tokens per second of many sessions on one target: `python -m benchmarks.concurrency [--backends onnx] [--quick]`.

Every session decodes the same number of tokens, greedily, without a draft, through the engine that a server runs. The
counts of sessions take turns; the best round of each counts.

`--against FOLDER` compares this checkout with another one, such as a git worktree of an earlier commit: the two take
turns, each time in a new process, and the ratio of each turn counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import torch

from benchmarks.report import print_json, print_table
from benchmarks.shapes import MAX_LENGTH, SHAPES, checkpoint, workspace
from inference.backends.registry import load_backend
from inference.commit import Commit
from inference.config import ModelConfig
from inference.engine.target import EngineLimits, TargetEngine
from inference.model.slots import Backend
from inference.request import GenerationRequest
from inference.speculation.slot_decoder import SlotDecoder

COUNTS = (1, 2, 4, 8, 16)
PROMPT_LENGTH = 64


def main() -> None:
    args = _parser().parse_args()
    with workspace(args.folder) as folder:
        if args.against:
            _compare(args, folder)
            return
        results = {backend: _measure(backend, args, folder) for backend in args.backends.split(",")}
    header = ["backend", *(f"{count} sessions" for count in COUNTS), f"{COUNTS[-1]} / 1"]
    rows = [
        [backend, *(f"{rates[count]:.0f}" for count in COUNTS), f"{rates[COUNTS[-1]] / rates[1]:.2f}"]
        for backend, rates in results.items()
    ]
    print_table(f"{args.model}, {args.threads} thread(s), tokens per second of all sessions together", header, rows)
    print_json("concurrency", {"model": args.model, "threads": args.threads, "tokens_per_s": results})


def _compare(args: argparse.Namespace, folder: Path) -> None:
    """Print the ratios of this checkout's rates to those of the other one: medians, smallest and largest."""
    here = Path(__file__).resolve().parents[1]
    turns = [[_rates_of(root, args, folder) for root in (args.against.resolve(), here)] for _ in range(args.repeats)]
    rows, found = [], {}
    for backend in args.backends.split(","):
        ratios = [[new[backend][str(count)] / old[backend][str(count)] for old, new in turns] for count in COUNTS]
        rows.append([backend, *(f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in ratios)])
        found[backend] = dict(zip(COUNTS, ratios, strict=True))
    header = ["backend", *(f"{count} sessions" for count in COUNTS)]
    title = f"{args.model}, {args.threads} thread(s): tokens per second, as multiples of the other checkout's"
    print_table(title, header, rows)
    print_json("concurrency_against", {"model": args.model, "threads": args.threads, "ratios": found})


def _rates_of(root: Path, args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Run one round of this file over a checkout's modules; return tokens per second by backend and count."""
    own = ["--backends", args.backends, "--model", args.model, "--threads", args.threads, "--tokens", args.tokens]
    completed = subprocess.run(
        [sys.executable, __file__, *map(str, own), "--rounds", "1", "--folder", str(folder)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rates: dict[str, dict[str, float]] = json.loads(completed.stdout.splitlines()[-1])["results"]["tokens_per_s"]
    return rates


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of few tokens")
    parser.add_argument("--model", default="target", help=f"of {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--backends", default="torch,onnx,onnx-int8", help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="per session (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, to compare with")
    parser.add_argument("--repeats", type=int, default=5, help="turns of both checkouts (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep random models here between runs")
    return parser


def _measure(backend_name: str, args: argparse.Namespace, folder: Path) -> dict[int, float]:
    """Return tokens per second by number of sessions."""
    backend = _load(backend_name, args, folder, COUNTS[-1], MAX_LENGTH)
    num_tokens, rounds = (16, 1) if args.quick else (args.tokens, args.rounds)
    return asyncio.run(_rates(backend, num_tokens=num_tokens, rounds=rounds))


def _load(backend_name: str, args: argparse.Namespace, folder: Path, num_slots: int, max_length: int) -> Backend:
    torch.set_num_threads(args.threads)
    name, _, dtype = backend_name.partition("-")
    config = ModelConfig(
        checkpoint(args.model, folder),
        backend=name,
        dtype=dtype or "float32",
        device="cpu",
        num_slots=num_slots,
        sequence_length=max_length,
        num_threads=args.threads,
    )
    return load_backend(config)


async def _rates(backend: Backend, *, num_tokens: int, rounds: int) -> dict[int, float]:
    engine = TargetEngine(SlotDecoder(backend), EngineLimits(lookup=False))
    engine.start()
    rates = dict.fromkeys(COUNTS, 0.0)
    try:
        for count in COUNTS:  # builds what each number of sessions needs
            await _run(engine, count, num_tokens=2)
        for _ in range(rounds):
            for count in COUNTS:
                started = time.perf_counter()
                num_committed = await _run(engine, count, num_tokens=num_tokens)
                rates[count] = max(rates[count], num_committed / (time.perf_counter() - started))
    finally:
        await engine.stop()
    return rates


async def _run(engine: TargetEngine, count: int, *, num_tokens: int) -> int:
    """Decode in `count` sessions at once; return the number of tokens committed."""
    return sum(await asyncio.gather(*(_session(engine, index, num_tokens) for index in range(count))))


async def _session(engine: TargetEngine, index: int, num_tokens: int, length: int = PROMPT_LENGTH) -> int:
    request = GenerationRequest(_prompt(index, length), max_new_tokens=num_tokens)
    num_committed = 0
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            num_committed += len(event.token_ids) if isinstance(event, Commit) else 0
    return num_committed


def _prompt(index: int, length: int) -> tuple[int, ...]:
    return tuple((index * 131 + position * 7919) % 2000 + 3 for position in range(length))


if __name__ == "__main__":
    main()
