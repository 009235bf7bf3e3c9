"""Pass time by width: `python -m benchmarks.passes [--quick] [--models target,15M] [--engines onnx] [--threads 1,2]`.

A pass runs `width` tokens after 128 others and makes the logits of all of them. The limit is the time to read the
float32 weights once at the measured bandwidth, or to multiply with them at the measured rate, whichever is longer.
(Caches hold a part of small models, so their passes can beat it; int8 reads a quarter.)
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import safe_open

from benchmarks.engines import ENGINES
from benchmarks.machine import Machine, measure_machine
from benchmarks.report import print_json, print_table
from benchmarks.shapes import SHAPES, checkpoint, workspace
from benchmarks.timing import Times, interleaved

WIDTHS = (1, 2, 4, 6, 8, 16)
QUICK_WIDTHS = (1, 6)
DEFAULT_MODELS = "draft,target,15M,110M"

TimesByEngine: TypeAlias = dict[str, dict[int, Times]]


def main() -> None:
    args = _parser().parse_args()
    results = []
    with workspace(args.folder) as folder:
        for num_threads in (int(number) for number in args.threads.split(",")):
            for name in args.models.split(","):
                path = checkpoint(name, folder)
                num_bytes = weight_bytes(path)
                before = measure_machine(num_threads)  # twice, because a busy moment would make the limit easy
                times = _measure(path, args.engines.split(","), num_threads, quick=args.quick, seconds=args.seconds)
                machine = before.best(measure_machine(num_threads))
                _print(name, machine, num_bytes, times)
                results += _results(name, machine, num_bytes, times)
    print_json("passes", results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.passes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="widths 1 and 6, few runs")
    parser.add_argument("--models", default=DEFAULT_MODELS, help=f"of {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="%(default)s")
    parser.add_argument("--threads", default="1,2", help="%(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="limit per width of a model (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep random models here between runs")
    return parser


def _measure(path: Path, engines: list[str], num_threads: int, *, quick: bool, seconds: float) -> TimesByEngine:
    """Return the times of a model's passes, by engine and by width in tokens; engines take turns at each width."""
    passes = {engine: ENGINES[engine](path, num_threads) for engine in engines}
    times: TimesByEngine = {engine: {} for engine in engines}
    rounds = 3 if quick else 12
    for width in QUICK_WIDTHS if quick else WIDTHS:
        variants = {engine: partial(run, width) for engine, run in passes.items()}
        for engine, taken in interleaved(variants, rounds=rounds, seconds=seconds).items():
            times[engine][width] = taken
    return times


def _results(name: str, machine: Machine, num_bytes: int, times: TimesByEngine) -> list[dict[str, Any]]:
    return [
        {
            "model": name,
            "weight_bytes": num_bytes,
            **asdict(machine),
            "engine": engine,
            "width": width,
            "min_ms": taken.minimum,
            "median_ms": taken.median,
            "limit_ms": machine.pass_ms(num_bytes, width),
        }
        for engine, by_width in times.items()
        for width, taken in by_width.items()
    ]


def _print(name: str, machine: Machine, num_bytes: int, times: TimesByEngine) -> None:
    widths = list(next(iter(times.values())))
    title = (
        f"{name}, {machine.num_threads} thread(s), {num_bytes / 1e6:.0f} MB of weights, {machine.bandwidth:.1f} GB/s, "
        f"{machine.arithmetic:.0f} GFLOP/s. Minimum (median) in ms"
    )
    header = ["", *(f"width {width}" for width in widths), f"width {widths[-1]} / 1", "limit / width 1"]
    limits = [machine.pass_ms(num_bytes, width) for width in widths]
    rows = [["limit", *(f"{limit:.2f}" for limit in limits), f"{limits[-1] / limits[0]:.2f}", "1.00"]]
    for engine, by_width in times.items():
        cells = [f"{taken.minimum:.2f} ({taken.median:.2f})" for taken in by_width.values()]
        first, last = by_width[widths[0]].minimum, by_width[widths[-1]].minimum
        rows.append([engine, *cells, f"{last / first:.2f}", f"{limits[0] / first:.2f}"])
    print_table(title, header, rows)


def weight_bytes(path: Path) -> int:
    """Return the bytes of the float32 weights that a pass reads.

    These are all weights, but the embedding only if it is the output layer, too.
    """
    total = 0
    has_head = False
    embedding = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118 - it is no mapping
                size = 4
                for length in tensors.get_slice(tensor).get_shape():
                    size *= length
                has_head = has_head or tensor.startswith("lm_head")
                embedding += size if "embed_tokens" in tensor else 0
                total += size
    return total - embedding if has_head else total


if __name__ == "__main__":
    main()
