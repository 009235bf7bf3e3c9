"""Tokens per second of many sessions on one target: `python -m benchmarks.concurrency [--backends onnx] [--quick]`.

Every session decodes the same number of tokens, greedily, without a draft, through the engine that a server runs. The
counts of sessions take turns; the best round of each counts.

`--against FOLDER` compares this checkout with another one, such as a git worktree of an earlier commit. A process of
each is loaded, and the two take turns of a fraction of a second; the ratio of each pair of turns counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import torch

from benchmarks.report import print_json, print_table
from benchmarks.shapes import MAX_LENGTH, SHAPES, checkpoint, workspace
from specdec.inference.backends.registry import load_backend
from specdec.inference.commit import Commit
from specdec.inference.config import ModelConfig
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.slots import Backend
from specdec.inference.request import GenerationRequest
from specdec.inference.speculation.slot_decoder import SlotDecoder

COUNTS = (1, 2, 4, 8, 16)
PROMPT_LENGTH = 64


def main() -> None:
    args = _parser().parse_args()
    with workspace(args.folder) as folder:
        if args.answer:
            asyncio.run(_answer(args, folder))
            return
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
    """Print this checkout's tokens per second over those of the checkout in `args.against`: median and quartiles."""
    rows, found = [], {}
    for backend in args.backends.split(","):
        found[backend] = _ratios(backend, args, folder)
        for place, clock in enumerate(("clock", "by CPU")):
            ratios = [[pair[place] for pair in pairs] for pairs in found[backend].values()]
            rows.append([f"{backend}, {clock}", *map(_quartiles, ratios)])
    header = ["backend", *(f"{count} sessions" for count in COUNTS)]
    title = f"{args.model}, {args.threads} thread(s): tokens per second, as multiples of the other checkout's"
    print_table(title, header, rows)
    print_json("concurrency_against", {"model": args.model, "threads": args.threads, "ratios": found})


def _ratios(backend: str, args: argparse.Namespace, folder: Path) -> dict[int, list[tuple[float, float]]]:
    """Return ratios of this checkout's tokens per second to those of `args.against`, by number of sessions.

    Both checkouts are measured in turns; each pair of turns gives (ratio by the clock, ratio by CPU time).
    """
    here = Path(__file__).resolve().parents[1]
    ratios: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
    for _ in range(args.repeats):
        with ExitStack() as stack:
            old, new = (stack.enter_context(_measurer(root, backend, args, folder)) for root in (args.against, here))
            for number, count in itertools.product(range(args.rounds), COUNTS):
                first, second = (old, new) if number % 2 else (new, old)
                taken = {id(each): _taken(each, count) for each in (first, second)}
                ratios[count].append((taken[id(old)][0] / taken[id(new)][0], taken[id(old)][1] / taken[id(new)][1]))
    return ratios


@contextmanager
def _measurer(root: Path, backend: str, args: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process with the code at `root`, which measures each number of sessions that it reads from stdin."""
    own = ["--model", args.model, "--threads", args.threads, "--tokens", args.tokens, "--folder", folder.resolve()]
    command = [sys.executable, __file__, "--backends", backend, *map(str, own), "--answer"]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(root.resolve())},
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.communicate()  # closes its input, which ends it


def _taken(process: subprocess.Popen[str], count: int) -> tuple[float, float]:
    """Let a process of `_measurer` run this number of sessions; return the wall-clock and CPU seconds that it took."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(count, file=process.stdin, flush=True)
    wall_s, cpu_s = map(float, process.stdout.readline().split())
    return wall_s, cpu_s


def _quartiles(ratios: Sequence[float]) -> str:
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({lower:.2f}-{upper:.2f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of few tokens")
    parser.add_argument("--model", default="target", help=f"of {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--backends", default="torch,onnx,onnx-int8", help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="per session (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, to compare with")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of processes (%(default)s)")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)  # measure the counts read from stdin
    parser.add_argument("--folder", type=Path, help="keep random models here between runs")
    return parser


def _measure(backend_name: str, args: argparse.Namespace, folder: Path) -> dict[int, float]:
    """Return the tokens per second of all sessions together, by number of sessions, on a backend."""
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
    rates = dict.fromkeys(COUNTS, 0.0)
    async with _warm_engine(backend, num_tokens) as engine:
        for _, count in itertools.product(range(rounds), COUNTS):
            started = time.perf_counter()
            num_committed = await _run(engine, count, num_tokens=num_tokens)
            rates[count] = max(rates[count], num_committed / (time.perf_counter() - started))
    return rates


async def _answer(args: argparse.Namespace, folder: Path) -> None:
    """Run each number of sessions that is read from standard input; print the wall-clock and CPU seconds it took."""
    backend = _load(args.backends, args, folder, COUNTS[-1], MAX_LENGTH)
    async with _warm_engine(backend, args.tokens) as engine:
        for line in sys.stdin:  # blocks the event loop, on which nothing else waits
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await _run(engine, int(line), num_tokens=args.tokens)
            print(time.perf_counter() - wall_s, time.process_time() - cpu_s, flush=True)


@asynccontextmanager
async def _warm_engine(backend: Backend, num_tokens: int) -> AsyncIterator[TargetEngine]:
    """Yield a running engine that has served each number of sessions once, so that nothing is built while measuring."""
    engine = TargetEngine(SlotDecoder(backend), EngineLimits(lookup=False))
    engine.start()
    try:
        for count in COUNTS:
            await _run(engine, count, num_tokens=num_tokens)
        yield engine
    finally:
        await engine.stop()


async def _run(engine: TargetEngine, count: int, *, num_tokens: int) -> int:
    """Decode greedily in `count` sessions at once, `num_tokens` each; return the number of tokens of all."""
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
