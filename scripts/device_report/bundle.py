"""Archive for bug reports ("support bundle"): everything that explains a report, and nothing private.

Of the environment it has only the variables of Neuron and its compiler, since others may be secrets.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.device_report.tables import by_kind
from scripts.device_report.variant import Variant
from specdec.inference.backends.neuron.storage.artifacts import artifacts_root
from specdec.inference.backends.neuron.storage.store import MANIFEST, publications

PREFIXES = ("NEURON_", "XLA_", "UNSAFE_FP8FNCAST", "BASE_COMPILE_WORK_DIR")
PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "neuronx-distributed", "neuronx-distributed-inference")
COMMANDS = (["neuron-ls"], ["nvidia-smi"], ["lscpu"], ["free", "-g"], ["uname", "-srm"])
TIMEOUT_S = 60


def write_bundle(output: Path, variants: Sequence[Variant], configs: Sequence[Path]) -> Path:
    """Write results.json, results.csv and system.json to `output`; pack this folder into an archive beside it.

    The archive also has the configuration files, and the manifests of compiled models. Return its path.
    """
    cells = [cell for cells in by_kind(variants).values() for cell in cells]
    (output / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
    _write_csv(output / "results.csv", cells)
    (output / "system.json").write_text(json.dumps(_system(variants), indent=1) + "\n")
    bundle = output.with_name(f"{output.name}.tar.gz")
    with tarfile.open(bundle, "w:gz") as archive:
        archive.add(output, output.name)
        for file in configs:
            archive.add(file, f"{output.name}/configs/{file.name}")
        for file in _manifests(variants):
            archive.add(file, f"{output.name}/compiled/{file.parent.name}.json")
    return bundle


def _write_csv(file: Path, cells: Sequence[dict[str, Any]]) -> None:
    """Write a CSV row for each server and kind of prompts; each figure of a distribution has a column of its own."""
    rows = [
        {f"{name}_{part}" if part else name: value for name, each in cell.items() for part, value in _parts(each)}
        for cell in cells
    ]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return a result as (name, figure) pairs: several of a distribution, one with the name "" of a single figure.

    A list, which has error messages, gives none.
    """
    if isinstance(value, dict):
        return list(value.items())
    return [] if isinstance(value, list) else [("", value)]


def _system(variants: Sequence[Variant]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in (*PACKAGES, "transformers")},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
        "commands": {" ".join(command): _output(command) for command in COMMANDS},
        "servers": [{"arguments": variant.arguments, "start_s": variant.start_s} for variant in variants],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(command: Sequence[str]) -> str:
    """Run a command; return its output with its errors, or the reason why it could not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def _manifests(variants: Sequence[Variant]) -> list[Path]:
    """Return the manifest files of all compiled models in the folders that the servers use."""
    roots = {artifacts_root(variant.artifacts) for variant in variants}
    return sorted(each.folder / MANIFEST for root in roots for each in publications(root) if each.manifest is not None)
