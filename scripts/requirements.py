"""Generator of the requirements files from pyproject.toml, their only source: `python -m scripts.requirements`.

Each file has the packages of one extra, or of the runtime, with their comments from pyproject.toml. A range becomes its
newest version, which is the tested one. For a Neuron environment it stays a range, since the SDK chooses versions.
With `--oldest` it writes nothing, and prints the oldest versions that the ranges allow.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# Generated from pyproject.toml by `python -m scripts.requirements`: change it there.\n"
CLIENT = (
    "tokenizers",
    "numpy",
    "array-api-compat",
    "grpcio",
    "protobuf",
    "cryptography",
    "uvloop",
    "rich",
    "prometheus",
)
"""Beginnings of the names of what a client needs: `specdec fused_client` and `specdec.Client` ask a server."""
OF_THE_SDK = ("torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "numpy")
"""Packages whose oldest versions are those of the Neuron SDK, which belong together."""
NEEDS_RUNTIME = ("dev",)
"""Extras that install the runtime too; the others are for an environment that has it."""
_LINE = re.compile(r'^    "(?P<spec>[^"]+)",(?:  # (?P<why>.*))?$')
_START = re.compile(r"^(?P<name>[\w-]+) = \[$")


def requirements() -> dict[str, str]:
    """Return the content of every file, by name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    comments = _comments(text)
    files = {"requirements.txt": _file("dependencies", project["dependencies"], comments)}
    for extra, specs in project["optional-dependencies"].items():
        files[f"requirements/{extra}.txt"] = _file(extra, specs, comments)
    files["requirements/neuron.txt"] += _runtime_beside_neuron(project)
    asked = [spec for spec in project["dependencies"] if spec.startswith(CLIENT)]
    comments["client"] = "# A client alone: `pip install --no-deps .` beside this file; some 200 megabytes, no torch.\n"
    files["requirements/client.txt"] = _file("client", asked, comments)
    return files


def oldest() -> list[str]:
    """Return the oldest version of every package of the runtime but those of the SDK."""
    specs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return [re.sub(r">=([\w.]+),.*", r"==\1", spec) for spec in specs if not spec.startswith(OF_THE_SDK)]


def _comments(text: str) -> dict[str, str]:
    """Return the comments above each list, by the list's name, and beside each entry, by the entry."""
    comments: dict[str, str] = {}
    above = ""
    for line in text.splitlines():
        if start := _START.match(line):
            comments[start["name"]] = above
        elif (entry := _LINE.match(line)) and entry["why"]:
            comments[entry["spec"]] = entry["why"]
        above = f"{above}{line}\n" if line.startswith("#") else ""
    return comments


def _file(name: str, specs: list[str], comments: dict[str, str]) -> str:
    lines = ["-r ../requirements.txt"] if name in NEEDS_RUNTIME else []
    for spec in specs:
        own = re.fullmatch(r"specdec\[(\w+)\]", spec)
        lines.append(f"-r {own[1]}.txt" if own else _commented(pinned(spec), comments.get(spec)))
    return HEAD + comments[name] + "\n".join(lines) + "\n"


def _commented(requirement: str, why: str | None) -> str:
    return f"{requirement:48}  # {why}" if why else requirement


def pinned(spec: str) -> str:
    """Return a range as the newest version that it allows, and anything else as it is."""
    return re.sub(r">=[\w.]+,<=([\w.]+)", r"==\1", spec)


def _runtime_beside_neuron(project: dict[str, Any]) -> str:
    """Return the runtime as ranges, without what the Neuron packages bring and what only a CPU needs."""
    left_out = ("torch", "transformers", "onnx", "matplotlib")
    rest = [spec for spec in project["dependencies"] if not spec.startswith(left_out)]
    return "# The runtime; versions of ranges are the SDK's choice.\n" + "\n".join(rest) + "\n"


def main() -> None:
    if "--oldest" in sys.argv:
        print("\n".join(oldest()))
        return
    for name, content in requirements().items():
        (ROOT / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
