"""Output of a benchmark: a table for people, then one JSON line for programs, last."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}\n")
    for row in (header, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |", flush=True)


def print_json(benchmark: str, results: Any) -> None:
    """Print the last line: results and what they were measured with."""
    print(json.dumps({"benchmark": benchmark, "machine": machine(), "results": results}))


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for name in ("torch", "transformers", "numpy", "onnxruntime"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    cores = sorted(os.sched_getaffinity(0))
    return {"cpu": platform.processor() or platform.machine(), "cores": len(cores), "versions": versions}
