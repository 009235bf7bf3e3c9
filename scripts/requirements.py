"""Generator of the requirements files from pyproject.toml, their only source: `python -m scripts.requirements`.

Each file has the packages of one extra, or of a server (the base dependencies and the extra `server`), with their
comments from pyproject.toml. A range of versions becomes its tested version: that of the group `tested`, or else its
newest one. For a Neuron environment it stays a range, since the Neuron SDK chooses versions. With `--oldest` it writes
nothing, and prints the oldest versions that the ranges allow.
"""

from __future__ import annotations

import re
import sys
import tomllib
from os.path import relpath
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# Generated from pyproject.toml by `python -m scripts.requirements`: change it there.\n"
OF_THE_SDK = ("torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "numpy")
"""Packages that the Neuron SDK brings, and whose oldest versions it so determines together."""
RUNTIME = "server"
"""Extra whose packages requirements.txt has with the base dependencies; other extras' files are installed after it."""
_LINE = re.compile(r'^    "(?P<spec>[^"]+)",(?:  # (?P<why>.*))?$')
_START = re.compile(r"^(?P<name>[\w-]+) = \[$")


def requirements() -> dict[str, str]:
    """Return the text of every requirements file, by the file's path."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    comments, tested = _comments(text), content["dependency-groups"]["tested"]
    files = {}
    for extra, specs in content["project"]["optional-dependencies"].items():
        whole = runtime(content["project"]) if extra == RUNTIME else specs
        files[file_of(extra)] = _file(extra, whole, comments, tested)
    files[file_of("neuron")] += _runtime_beside_neuron(content["project"])
    return files


def runtime(project: dict[str, Any]) -> list[str]:
    """Return the requirements, with ranges of versions, of everything that a server needs.

    `project` is the table of that name in pyproject.toml.
    """
    return [*project["dependencies"], *project["optional-dependencies"][RUNTIME]]


def file_of(extra: str) -> str:
    """Return the path of the requirements file with an extra's packages."""
    return "requirements.txt" if extra == RUNTIME else f"requirements/{extra}.txt"


def oldest() -> list[str]:
    """Return the oldest allowed version of every package of a server, except those that the Neuron SDK brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.sub(r">=([\w.]+),.*", r"==\1", spec) for spec in runtime(project) if not spec.startswith(OF_THE_SDK)]


def _comments(text: str) -> dict[str, str]:
    """Return pyproject.toml's comments: those above a list by the list's name, those beside an entry by the entry."""
    comments: dict[str, str] = {}
    above = ""
    for line in text.splitlines():
        if start := _START.match(line):
            comments[start["name"]] = above
        elif (entry := _LINE.match(line)) and entry["why"]:
            comments[entry["spec"]] = entry["why"]
        above = f"{above}{line}\n" if line.startswith("#") else ""
    return comments


def _file(name: str, specs: list[str], comments: dict[str, str], tested: list[str]) -> str:
    lines = []
    for spec in specs:
        own = re.fullmatch(r"specdec-serve\[(\w+)\]", spec)
        lines.append(
            f"-r {relpath(file_of(own[1]), 'requirements')}"
            if own
            else _commented(pinned(spec, tested), comments.get(spec))
        )
    return HEAD + comments[name] + "\n".join(lines) + "\n"


def _commented(requirement: str, why: str | None) -> str:
    return f"{requirement:48}  # {why}" if why else requirement


def pinned(spec: str, tested: list[str]) -> str:
    """Return a range of versions as its tested version; any other requirement is returned unchanged.

    `tested` has entries NAME==VERSION; for a package that it lacks, the newest version of the range is taken.
    """
    known = (each for each in tested if each.partition("==")[0] == spec.partition(">=")[0])
    return next(known, re.sub(r">=[\w.]+,<=([\w.]+)", r"==\1", spec))


def _runtime_beside_neuron(project: dict[str, Any]) -> str:
    """Return lines with a server's packages as ranges, without those that Neuron's bring or that only a CPU needs."""
    left_out = ("torch", "transformers", "onnx", "matplotlib")
    rest = [spec for spec in runtime(project) if not spec.startswith(left_out)]
    return "# The runtime; versions of ranges are the SDK's choice.\n" + "\n".join(rest) + "\n"


def main() -> None:
    if "--oldest" in sys.argv:
        print("\n".join(oldest()))
        return
    for name, content in requirements().items():
        (ROOT / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
