"""Output of a benchmark: a table for people, then one JSON line for programs, last."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from comparison.plan.machine import cpu_model
from inference.config import ROOT

_PRINTED: list[str] = []


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table; the JSON line will hold it too, for generated pages."""
    _PRINTED.append(f"{title}\n\n{markdown(header, rows)}")
    print(f"\n{_PRINTED[-1]}", flush=True)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = (header, ["-" * width for width in widths], *rows)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in lines
    )


def print_json(benchmark: str, results: Any) -> None:
    """Print the last line: the results, and the machine and versions of the measurement."""
    print(json.dumps({"benchmark": benchmark, "machine": machine(), "tables": _PRINTED, "results": results}))


def machine() -> dict[str, Any]:
    """Return the machine and the versions on which the figures depend."""
    versions = {}
    for name in ("torch", "transformers", "numpy", "onnxruntime"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    cores = sorted(os.sched_getaffinity(0))
    return {"cpu": cpu_model(), "cores": len(cores), "system": platform.platform(terse=True), "versions": versions}


def commit() -> str:
    """Return the commit of this checkout; "-dirty" follows if its sources differ from it."""
    changed = _git("status", "--porcelain", "-uno", "--", ".", ":!docs")
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def write(content: Mapping[str, Any], file: Path) -> None:
    """Write the content as JSON, a line per entry."""
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
