"""Shell scripts that replace programs on PATH, and record how they are called."""

from __future__ import annotations

import os
import sys
from pathlib import Path

KUBECTL = """#!/bin/sh
case "$*" in
    *"create secret"*)
        echo "$*" >> "$KEPT/../asked"
        while [ "$1" != --from-file ]; do shift; done
        cp "$2"/* "$KEPT" ;;
    *) cat > /dev/null ;;
esac
"""
"""Script instead of kubectl: a Secret that it should create from files has these files copied to the folder KEPT."""


def stand_in(folder: Path, name: str, script: str) -> dict[str, str]:
    """Write `script` as a program called `name`; return an environment whose PATH finds it first."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(script)
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHON": sys.executable}
