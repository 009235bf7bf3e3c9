"""Long prompts beside running streams: `python -m benchmarks.long_prompts [--lengths 500,2000] [--backends onnx]`.

A prompt is read alone, and then beside three streams that decode: with the server's default of --prompt_share, and in
parts of 256 tokens, as long as others do not count (the row "parts of 256"). Gaps are those of the streams while the
prompt is read, in passes: their median gap without it. The engine is the one that a server runs, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import print_json, print_table
from benchmarks.shapes import SHAPES, checkpoint, workspace
from comparison.report.markdown import markdown, write_part
from inference.backends.registry import load_backend
from inference.commit import Commit
from inference.config import DEFAULT_PROMPT_SHARE, ModelConfig
from inference.engine.target import EngineLimits, TargetEngine
from inference.model.slots import Backend
from inference.request import GenerationRequest
from inference.serving.assembly import running
from inference.speculation.slot_decoder import SlotDecoder

NUM_STREAMS = 3
STREAM_PROMPT = 64
NUM_SETTLING = 40
"""Tokens of each stream before the long prompt comes; their gaps are the passes without it."""
SHARES = {"default": DEFAULT_PROMPT_SHARE, "parts of 256": 1000.0}


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one prompt beside streams.

    Attributes:
        pass_ms: median gap of the streams before the prompt came.
        gaps: median, 99th percentile and longest gap while it was read, in passes.
        slowdown: its time to first token, in times of the same prompt alone.
    """

    pass_ms: float
    gaps: tuple[float, float, float]
    slowdown: float


def main() -> None:
    args = _parser().parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    torch.set_num_threads(args.threads)
    rows, found = [], []
    with workspace(args.folder) as folder:
        path = checkpoint(args.model, folder)
        for name in args.backends.split(","):
            backend = _load(name, path, max(lengths) + 4096, args.threads)
            for length in lengths:
                for label, each in asyncio.run(_compare(backend, length, args.repeats)).items():
                    gaps = (f"{gap:.1f}" for gap in each.gaps)
                    rows.append([name, str(length), label, f"{each.pass_ms:.1f}", *gaps, f"{each.slowdown:.2f}"])
                    found.append({"backend": name, "length": length, "parts": label, **asdict(each)})
    header = ["backend", "prompt", "parts", "pass, ms", "gap p50", "p99", "longest", "TTFT / alone"]
    print_table(f"{args.model}, {args.threads} thread(s), {NUM_STREAMS} streams; gaps in passes", header, rows)
    if args.page:
        write_part(args.page, markdown(header, rows), "python -m benchmarks.long_prompts")
    print_json("long_prompts", {"model": args.model, "threads": args.threads, "found": found})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_prompts", description=__doc__)
    parser.add_argument("--model", default="15M", help=f"of {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--backends", default="onnx,torch", help="%(default)s")
    parser.add_argument("--lengths", default="500,2000,6000,16000", help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="of everything, interleaved (%(default)s)")
    parser.add_argument("--page", metavar="FILE#PART", help="part of a page that the table is written into")
    parser.add_argument("--folder", type=Path, help="keep random models here between runs")
    return parser


def _load(name: str, path: Path, max_length: int, num_threads: int) -> Backend:
    config = ModelConfig(
        path,
        backend=name,
        device="cpu",
        num_slots=NUM_STREAMS + 1,
        sequence_length=max_length,
        num_threads=num_threads,
        prefix_caching=False,
    )
    return load_backend(config)


async def _compare(backend: Backend, length: int, repeats: int) -> dict[str, Measured]:
    """Return the median of each figure, by the name of its share."""
    runs: dict[str, list[Measured]] = {label: [] for label in SHARES}
    for _ in range(repeats):
        for label, share in SHARES.items():
            limits = EngineLimits(lookup=False, prefix_caching=False, prompt_share=share)
            async with running(TargetEngine(SlotDecoder(backend), limits)) as engine:
                runs[label].append(await _measure(engine, length))
    return {label: _median(found) for label, found in runs.items()}


def _median(runs: Sequence[Measured]) -> Measured:
    p50, p99, longest = (statistics.median(column) for column in zip(*(run.gaps for run in runs), strict=True))
    pass_ms = statistics.median(run.pass_ms for run in runs)
    return Measured(pass_ms, (p50, p99, longest), statistics.median(run.slowdown for run in runs))


async def _measure(engine: TargetEngine, length: int) -> Measured:
    await _first_token_s(engine, 16)
    alone_s = await _first_token_s(engine, length)
    arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    streams = [asyncio.create_task(_stream(engine, index, arrivals[index])) for index in range(NUM_STREAMS)]
    while min(map(len, arrivals)) < NUM_SETTLING:  # noqa: ASYNC110 - streams set no asyncio.Event
        await asyncio.sleep(0.005)
    began = time.perf_counter()
    beside_s = await _first_token_s(engine, length)
    ended = time.perf_counter()
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    gaps = [(at, at - before) for each in arrivals for before, at in itertools.pairwise(each)]
    pass_s = statistics.median(gap for at, gap in gaps if at < began)
    during = [gap / pass_s for at, gap in gaps if began <= at <= ended]
    p50, p99, longest = (float(np.percentile(during, percent)) for percent in (50, 99, 100))
    return Measured(pass_s * 1e3, (p50, p99, longest), beside_s / alone_s)


async def _first_token_s(engine: TargetEngine, length: int) -> float:
    """Return the seconds to the first token after a prompt of so many tokens."""
    request = GenerationRequest(_prompt(99, length), max_new_tokens=1)
    began = time.perf_counter()
    async with aclosing(engine.generate(request)) as events:
        async for _ in events:
            pass
    return time.perf_counter() - began


async def _stream(engine: TargetEngine, index: int, arrivals: list[float]) -> None:
    """Decode until cancelled, and note the time of each token."""
    request = GenerationRequest(_prompt(index, STREAM_PROMPT), max_new_tokens=4000)
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Commit):
                arrivals.append(time.perf_counter())


def _prompt(index: int, length: int) -> tuple[int, ...]:
    return tuple((index * 131 + position * 7919) % 2000 + 3 for position in range(length))


if __name__ == "__main__":
    main()
