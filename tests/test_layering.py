"""Imports point downwards: the layers of the design, read from the sources.

main.py, compare_architectures.py
inference.comparison
inference.cli
inference.workers, inference.gateway
inference.engine
inference.speculation
inference.backends                  a concrete one is named by its registry alone
inference.sampling, ...             single modules: arithmetic, counters, text
inference.types, config, errors
grpc_comm                           knows nothing of inference
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FOUNDATION = ("types", "config", "errors")
MODULES, BACKENDS, SPECULATION, ENGINE, WORKERS, CLI, COMPARISON = range(1, 8)
PACKAGES = {
    "backends": BACKENDS,
    "speculation": SPECULATION,
    "engine": ENGINE,
    "workers": WORKERS,
    "gateway": WORKERS,
    "cli": CLI,
    "comparison": COMPARISON,
}
MAY_SPEAK_GRPC = ("workers", "gateway", "cli", "comparison")


def layer_of(module: str) -> int:
    """Height of a module of inference; equal heights may import each other."""
    name = module.split(".")[1] if "." in module else ""
    if name in FOUNDATION or not name:
        return 0
    return PACKAGES.get(name, MODULES)


def imports_of(module: str, source: str) -> Iterator[str]:
    """Everything a source imports, wherever the statement stands, with names that may be modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(module: str, source: str) -> list[str]:
    """Imports of a module that point upwards, or where its layer must not look."""
    return [f"{module} imports {name}" for name in imports_of(module, source) if not is_allowed(module, name)]


def is_allowed(module: str, name: str) -> bool:
    package = module.split(".")[1] if module.startswith("inference.") else ""
    if is_in(module, "grpc_comm"):
        return not is_in(name, "inference")
    if name.split(".")[0].startswith("grpc"):
        return package in MAY_SPEAK_GRPC
    if not is_in(name, "inference"):
        return True
    if is_in(name, "inference.backends") and package != "backends":
        return layer_of(module) >= WORKERS and is_in(name, "inference.backends.registry")
    return layer_of(name) <= layer_of(module)


def sources() -> list[Path]:
    files = [*(ROOT / "inference").rglob("*.py"), *(ROOT / "grpc_comm").rglob("*.py")]
    return sorted(file for file in files if "specdec/v1" not in file.as_posix())


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_point_downwards() -> None:
    files = sources()
    assert len(files) > 40
    found = [violation for file in files for violation in violations(module_name(file), file.read_text())]
    assert found == []


def test_every_package_has_a_layer() -> None:
    packages = {file.parent.name for file in (ROOT / "inference").glob("*/__init__.py")}
    assert packages <= set(PACKAGES)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("inference.engine.engine", "from inference.workers import draft"),
        ("inference.engine.target", "from inference.backends.pytorch import TorchBackend"),
        ("inference.engine.target", "from inference.backends.registry import load_backend"),
        ("inference.speculation.tree", "import inference.backends.pytorch"),
        ("inference.speculation.tree", "from inference.engine import engine"),
        ("inference.backends.pytorch", "def f():\n    from inference.speculation import tree"),
        ("inference.workers.target", "from inference.cli import app"),
        ("inference.workers.target", "from inference.backends.pytorch import TorchBackend"),
        ("inference.cli.app", "from inference.comparison import grid"),
        ("inference.types", "from inference import stats"),
        ("inference.sampling", "import grpc"),
        ("inference.engine.engine", "from grpc_comm import channel"),
        ("inference.engine.engine", "from ..workers import draft"),
        ("grpc_comm.server", "from inference.errors import ConfigError"),
        ("grpc_comm.server", "import inference"),
    ],
)
def test_planted_violations_are_found(module: str, statement: str) -> None:
    assert len(violations(module, f"import os\n{statement}\n")) == 1


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("inference.engine.engine", "from inference.engine import admission"),
        ("inference.engine.engine", "from inference.speculation.tree import DraftTree"),
        ("inference.workers.assembly", "from inference.backends.registry import load_backend"),
        ("inference.workers.assembly", "import grpc\nfrom grpc_comm.channel import open_channel"),
        ("inference.profile", "from inference.stats import RequestStats"),
        ("grpc_comm.server", "import grpc"),
    ],
)
def test_downward_imports_are_allowed(module: str, statement: str) -> None:
    assert violations(module, statement) == []


THIN = ("inference.workers.client", "inference.cli.launch", "inference.cli.generate", "main")


@pytest.mark.parametrize("module", THIN)
def test_thin_client_needs_no_model_library(module: str) -> None:
    """Whoever only sends requests installs no torch, and does not wait for it to load."""
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers', 'onnx') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
