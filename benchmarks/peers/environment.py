"""Python environments of the compared programs, under build/peers: requirements/NAME.txt on top of this project's."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from specdec.inference.config import ROOT

FOLDER = ROOT / "build" / "peers"


class UnavailableError(Exception):
    """Error of a program that cannot be measured here; its text is the reason."""


def python_of(name: str) -> Path:
    """Return the interpreter of the environment with the packages of requirements/`name`.txt; make it if missing.

    Raises:
        UnavailableError: pip could not install the packages.
    """
    requirements, folder = ROOT / "requirements" / f"{name}.txt", FOLDER / name
    stamp, python = folder / ".installed", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    print(f"{name}: installing {requirements.name} into {folder.relative_to(ROOT)}", flush=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "-r", str(requirements)])
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "specdec.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    stamp.write_text(requirements.read_text())
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise UnavailableError(last_line(done.stderr))


def last_line(text: str) -> str:
    """Return the last line of a program's error output that has a cause; hints of pip and pydantic are skipped.

    If vLLM's last line refers to an error of another process above it, that error's line is returned.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("[notice]", "For further information"))]
    if lines and "cause above" in lines[-1]:
        lines = [line for line in lines if "Error: " in line and "cause above" not in line] or lines
    return lines[-1] if lines else "it ended without a word"
