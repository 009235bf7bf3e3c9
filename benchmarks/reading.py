"""Time to read a part of a prompt, by position: `python -m benchmarks.reading [--model 15M] [--positions 0,6000]`.

The limit is the time of the same multiplications at the measured rate of square float32 matrices: those with the
weights, as in `benchmarks.passes`, and those of attention, where each token multiplies with every position before it.
Logits are not made, as in all parts of a prompt but the last.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from benchmarks.decoding import load_model
from benchmarks.machine import measure_machine
from benchmarks.report import print_json, print_table
from benchmarks.shapes import SHAPES, Shape, checkpoint, workspace
from benchmarks.timing import interleaved
from inference.model.slots import Span

WIDTHS = (64, 256)
"""Tokens of a part: about what it has beside running streams, and alone (`inference.scheduling.prompt_parts`)."""


def main() -> None:
    args = _parser().parse_args()
    positions = [int(position) for position in args.positions.split(",")]
    shape = SHAPES[args.model]
    before = measure_machine(args.threads)
    with workspace(args.folder) as folder:
        times = _measure(checkpoint(args.model, folder), positions, args)
    rate = before.best(measure_machine(args.threads)).arithmetic
    rows, found = [], []
    for (start, width), milliseconds in times.items():
        limit = _flops(shape, start, width) / rate / 1e6
        rows.append([str(start), str(width), f"{milliseconds:.1f}", f"{limit:.1f}", f"{limit / milliseconds:.2f}"])
        found.append({"start": start, "width": width, "min_ms": milliseconds, "limit_ms": limit})
    header = ["first position", "tokens", "ms", "limit, ms", "limit / ms"]
    print_table(f"{args.model}, onnx float32, {args.threads} thread(s), {rate:.0f} GFLOP/s", header, rows)
    print_json("reading", found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("--model", default="15M", help=f"of {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--positions", default="0,2000,6000", help="before the part (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--folder", type=Path, help="keep random models here between runs")
    return parser


def _measure(path: Path, positions: list[int], args: argparse.Namespace) -> dict[tuple[int, int], float]:
    """Return the shortest milliseconds of each part, by its first position and its width.

    What lies before a part was never written: the times of products do not depend on it.
    """
    length = max(positions) + max(WIDTHS)
    backend = load_model(path, backend="onnx", dtype="float32", threads=args.threads, max_length=length)
    spans = {(start, width): Span(0, start, [5] * width, 0) for start in positions for width in WIDTHS}
    variants = {str(key): partial(backend.forward, [span]) for key, span in spans.items()}
    times = interleaved(variants, rounds=6, runs=2, seconds=60)
    return {key: times[str(key)].minimum for key in spans}


def _flops(shape: Shape, start: int, width: int) -> int:
    """Return the multiplications and additions of a part."""
    head_dim = shape.hidden_size // shape.num_heads
    projections = 2 * shape.hidden_size + 2 * shape.num_kv_heads * head_dim
    weights = shape.num_layers * shape.hidden_size * (projections + 3 * shape.intermediate_size)
    seen = sum(range(start + 1, start + width + 1))
    return 2 * width * weights + 4 * shape.num_layers * shape.hidden_size * seen


if __name__ == "__main__":
    main()
