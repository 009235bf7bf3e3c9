"""`make test-nxdi NXDI_SOURCES=DIR`: the neuron tests on NxDI's own sources, in a Python environment made for them.

NxDI needs Transformers 4.57, which the project's environment does not have. So the tests run in an environment of their
own in the user's cache, made once per set of pinned packages. This module imports the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("neuronx-distributed-inference", "neuronx-distributed")
REPLACED = {"transformers": "transformers==4.57.6", "tokenizers": "", "huggingface-hub": "", "matplotlib": ""}
"""Pins in place of those of requirements.txt: Transformers brings two of them; an image may lack matplotlib."""
ADDED = ("tenacity==9.1.2",)
TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx", "scipy")
"""Packages of TEST_FILES that the tests need."""
TEST_FILES = ("requirements/dev.txt", "requirements/endpoints.txt")
TESTS = (
    *("tests/unit/backends/neuron", "tests/nxdi_real"),
    *("tests/integration/test_neuron_servers.py", "tests/integration/test_device_report.py"),
)
NUM_PROCESSES = 2


def main() -> int:
    """Run the tests; return pytest's exit code, or 2 if the folder in the argument lacks the sources."""
    if len(sys.argv) < 2 or not sys.argv[1]:
        print("usage: make test-nxdi NXDI_SOURCES=DIR, where DIR has clones of", *PACKAGES, file=sys.stderr)
        return 2
    sources = Path(sys.argv[1]).resolve()
    for package in PACKAGES:
        if not (sources / package / "src").is_dir():
            print(f"NXDI_SOURCES={sources} has no {package}/src", file=sys.stderr)
            return 2
    python = environment(pins())
    command = [
        str(python),
        "-m",
        "pytest",
        "--nxdi",
        "real",
        "-m",
        "not long",
        "--numprocesses",
        str(NUM_PROCESSES),
        *TESTS,
    ]
    variables = {**os.environ, "NXDI_SOURCES": str(sources), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, "--dist", "loadscope", *sys.argv[2:]], cwd=ROOT, env=variables).returncode


def pins() -> list[str]:
    """Return lines for pip, each a package and its version."""
    runtime = {_name(line): line for line in _lines("requirements.txt")} | REPLACED
    tools = {_name(line): line for file in TEST_FILES for line in _lines(file)}
    return sorted(line for line in [*runtime.values(), *(tools[name] for name in TEST_TOOLS), *ADDED] if line)


def _lines(file: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("-")]


def _name(line: str) -> str:
    return line.partition(";")[0].partition("=")[0].strip()


def environment(lines: list[str]) -> Path:
    """Return the Python of an environment with exactly these packages, made if it is missing."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join([version, *lines]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "specdec" / f"nxdi-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.is_file():
        print(f"making the environment {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *lines], check=True)
        complete.write_text("\n".join(lines) + "\n")
    return python


if __name__ == "__main__":
    sys.exit(main())
