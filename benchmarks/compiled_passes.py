"""Passes of torch compiled by inductor, for families that backend onnx lacks: `python -m benchmarks.compiled_passes`.

One slot of 8 is active. A pass runs 1, 5 or 16 tokens after 128 others and makes logits of all of them; a prompt of
10 or 200 tokens is read from its start, up to its first token. `onnx` runs a Llama of the same sizes. The compiled
passes have exactly these widths, the most favourable shapes there are. Run it twice with the same --folder: the second
time the compiled code is found there.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines import PAST_LENGTH, token_ids
from benchmarks.report import print_json, print_table
from benchmarks.shapes import MAX_LENGTH, checkpoint, workspace
from benchmarks.timing import Times, interleaved
from inference.backends.pytorch.backend import TorchBackend
from inference.backends.pytorch.graphs import Compiled
from inference.backends.pytorch.shapes import Buckets
from inference.backends.pytorch.static_pass import FixedShapes
from inference.backends.registry import load_backend
from inference.config import ModelConfig
from inference.model.slots import Backend, Span

FAMILIES = "gpt2,gpt_neox,qwen3_moe,gpt_oss"
WIDTHS, PROMPTS = (1, 5, 16), (10, 200)
NUM_SLOTS, SLOT = 8, 3
BUCKETS = Buckets(widths=WIDTHS, prompts=PROMPTS[-1:], batches=(1,), shortest=MAX_LENGTH)
KIB_PER_MIB = 1024

Cells: TypeAlias = dict[str, Times]
"""Times by what runs: width 1, ..., prompt 200."""


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    results = []
    with workspace(args.folder) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        for name in args.models.split(","):
            results += _measure(name, folder, num_threads=args.threads, seconds=args.seconds)
    print_json("compiled_passes", results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled_passes", description=__doc__)
    default = ",".join(f"{family}-15M" for family in FAMILIES.split(","))
    parser.add_argument("--models", default=default, help="FAMILY-SIZE,... (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--seconds", type=float, default=6.0, help="limit per cell (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep random models and compiled code here between runs")
    return parser


def _measure(name: str, folder: Path, *, num_threads: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the three engines in turn, print their table, and return a result per engine."""
    path, twin = checkpoint(name, folder), checkpoint(name.rpartition("-")[2], folder)
    before, started = _memory_mib(), time.monotonic()
    compiled = _compiled(path)
    made_s, made_mib = time.monotonic() - started, _memory_mib() - before
    backends = {
        "torch": _loaded(path, "torch", num_threads),
        "torch, compiled": compiled,
        "onnx, Llama": _loaded(twin, "onnx", num_threads),
    }
    times: dict[str, Cells] = {engine: {} for engine in backends}
    for cell, run in _cells().items():
        variants = {engine: partial(run, backend) for engine, backend in backends.items()}
        for engine, taken in interleaved(variants, rounds=12, seconds=seconds).items():
            times[engine][cell] = taken
    _print(f"{name}: {compiled.graphs.num} graphs in {made_s:.0f} s, {made_mib:.0f} MiB", times)
    facts = {"model": name, "graphs": compiled.graphs.num, "made_s": made_s, "made_mib": made_mib}
    return [
        {**facts, "engine": engine, "cell": cell, "min_ms": taken.minimum, "median_ms": taken.median}
        for engine, cells in times.items()
        for cell, taken in cells.items()
    ]


def _cells() -> dict[str, Callable[[Backend], object]]:
    def run(start: int, width: int, num_logits: int, backend: Backend) -> object:
        return backend.forward([Span(SLOT, start, token_ids(width), num_logits)])

    widths = {f"width {width}": partial(run, PAST_LENGTH, width, width) for width in WIDTHS}
    return {**widths, **{f"prompt {width}": partial(run, 0, width, 1) for width in PROMPTS}}


def _compiled(path: Path) -> TorchBackend:
    """Load a model and compile the shapes of the cells."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fixed = FixedShapes(Compiled("inductor"), BUCKETS)
    backend = TorchBackend(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed)
    for run in _cells().values():
        run(backend)
    return backend


def _loaded(path: Path, backend: str, num_threads: int) -> Backend:
    kind: dict[str, Any] = {"backend": backend, "device": "cpu", "dtype": "float32", "sequence_length": MAX_LENGTH}
    return load_backend(ModelConfig(path, num_slots=NUM_SLOTS, num_threads=num_threads, **kind))


def _print(title: str, times: dict[str, Cells]) -> None:
    """Print medians, and the two ratios that decide: eager and onnx to compiled."""
    compiled = times["torch, compiled"]
    rows = [[engine, *(f"{taken.median:.2f}" for taken in cells.values())] for engine, cells in times.items()]
    for engine in ("torch", "onnx, Llama"):
        ratios = (compiled[cell].median / taken.median for cell, taken in times[engine].items())
        rows.append([f"compiled / {engine}", *(f"{ratio:.2f}" for ratio in ratios)])
    print_table(f"{title}. Median in ms", ["", *compiled], rows)


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB


if __name__ == "__main__":
    main()
