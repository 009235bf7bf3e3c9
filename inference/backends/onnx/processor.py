"""What the processor of this machine can do, which decides how ONNX Runtime multiplies."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


@cache
def instruction_sets() -> str:
    """The line of /proc/cpuinfo that names them; the processor's name where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
