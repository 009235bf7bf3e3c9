"""Benchmark set of the project in one file: `make bench`, or `python -m benchmarks.suite [--quick] [FILE]`.

It takes under ten minutes on two cores with nothing else to do. FILE (docs/performance.json) holds every result with
the machine, the versions, the commit and how busy the machine was; `python -m benchmarks.page` makes the tables of
docs/measurements and the figures of README.md from it, and `specdec diff OLD NEW` compares two.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import machine, write
from specdec.comparison.report.markdown import commit
from specdec.inference.config import ROOT
from specdec.inference.observe.host_load import load_average

FILE = ROOT / "docs" / "performance.json"
SET = {
    "passes": "-m benchmarks.passes --models draft,target --threads 1 --engines torch,onnx,onnx-int8 --seconds 4",
    "framework": "-m benchmarks.framework",
    "concurrency": "-m benchmarks.concurrency",
    "host_time": "-m benchmarks.host_time --rounds 2",
}
COMPARISON = "compare_architectures.py"
HAS_QUICK = ("passes", "concurrency")
QUICK_COMPARISON = "--num_prompts 1 --num_runs 3 --rtt_ms 0,10 --max_new_tokens 32"


def main() -> None:
    args = _parser().parse_args()
    load = load_average()
    benchmarks = {name: _benchmark(name, command, quick=args.quick) for name, command in SET.items()}
    content = {
        "machine": machine(),
        "load_before": load,
        "commit": commit(),
        "quick": args.quick,
        **benchmarks,
        "comparison": _comparison(quick=args.quick),
    }
    write(content, args.file)
    print(f"{args.file}: now python -m benchmarks.page")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help="what is written (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works")
    return parser


def _benchmark(name: str, command: str, *, quick: bool) -> dict[str, Any]:
    """Run a benchmark of SET as a process; return its command, tables and results."""
    command += " --quick" if quick and name in HAS_QUICK else ""
    found = json.loads(_run(name, command))
    return {"command": f"python {command}", "tables": found["tables"], "results": found["results"]}


def _comparison(*, quick: bool) -> dict[str, Any]:
    flags = f" {QUICK_COMPARISON}" if quick else ""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as directory:
        _run("comparison", f"{COMPARISON}{flags} --output {directory}")
        results = json.loads((Path(directory) / "results.json").read_text(encoding="utf-8"))
    # Paths relative to the checkout hold on every machine.
    conditions = {name: text.replace(f"{ROOT}/", "") for name, text in results["conditions"].items()}
    return {"command": f"specdec compare{flags}", **results, "conditions": conditions}


def _run(name: str, command: str) -> str:
    """Run a benchmark's command; return the last line of its output, which is JSON.

    Raises:
        SystemExit: the command ended with an error.
    """
    started = time.monotonic()
    print(f"{name}: python {command}", flush=True)
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode:
        sys.exit(f"{name} ended with exit code {done.returncode}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
