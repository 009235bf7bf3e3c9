"""Loading time and memory: `python -m benchmarks.startup [--models target,110M] [--engines onnx/int8]`.

Every load is a process of its own, with one slot of 256 positions: first with an empty cache of packed weights, then
again. Memory is the process's resident set at its peak; what is memory-mapped from a file is shared by all processes
that map it. The imports of Python packages, some hundred MiB, are in the memory but not in the time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.decoding import load_model
from benchmarks.report import print_json, print_table
from benchmarks.shapes import MAX_LENGTH, SHAPES, checkpoint, workspace
from inference.model.slots import Span

ENGINES = "torch/float32,onnx/float32,onnx/int8"
KIB_PER_MIB = 1024


def main() -> None:
    args = _parser().parse_args()
    if args.child:
        print(json.dumps(_load(args.child, args.engines, args.threads)))
        return
    results = []
    with workspace(args.folder) as folder:
        for name in args.models.split(","):
            path = checkpoint(name, folder)
            for engine in args.engines.split(","):
                shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
                for cache in ("empty", "filled"):
                    results.append({"model": name, "engine": engine, "cache": cache, **_measure(path, engine, args)})
    _report(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--models", default="draft,target,110M", help=f"of {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--engines", default=ENGINES, help="backend/dtype (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--folder", type=Path, help="keep random models here between runs")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def _measure(path: Path, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Load in a fresh process; return its figures."""
    command = [sys.executable, "-m", "benchmarks.startup", "--child", str(path)]
    command += ["--engines", engine, "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _load(path: Path, engine: str, threads: int) -> dict[str, Any]:
    """Load a model and run one pass, in the child process."""
    import inference.backends.onnx.backend
    import inference.backends.pytorch.backend  # noqa: F401 - imports are not what is measured

    before = _memory_mib()
    backend, dtype = engine.split("/")
    started = time.perf_counter()
    model = load_model(path, backend=backend, dtype=dtype, threads=threads, max_length=MAX_LENGTH)
    seconds = time.perf_counter() - started
    model.forward([Span(0, 0, [1, 2, 3], 1)])
    after = _memory_mib()
    return {
        "load_s": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB,
        "own_mib": after["RssAnon"] - before["RssAnon"],
        "mapped_mib": after["RssFile"] - before["RssFile"],
    }


def _memory_mib() -> dict[str, float]:
    """Return the resident memory now: the process's own, and that mapped from files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) / KIB_PER_MIB for words in lines if words and words[0].startswith("Rss")
    }


def _report(results: list[dict[str, Any]]) -> None:
    header = ["model", "engine", "cache", "load s", "peak MiB", "own MiB of the model", "mapped MiB"]
    rows = [
        [
            result["model"],
            result["engine"],
            result["cache"],
            f"{result['load_s']:.2f}",
            *(f"{result[field]:.0f}" for field in ("peak_mib", "own_mib", "mapped_mib")),
        ]
        for result in results
    ]
    print_table("Loading in a fresh process", header, rows)
    print_json("startup", results)


if __name__ == "__main__":
    main()
