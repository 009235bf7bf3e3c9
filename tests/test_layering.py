"""Imports point downwards: the rooms of docs/architecture.md, read from the sources.

main.py, compare_architectures.py
comparison                          knows servers by their command line and their API
inference.cli
inference.serving
inference.gateway
inference.workers
inference.vllm                      vLLM as an engine: the same contract, in vLLM's own environment
inference.engine
inference.speculation
inference.scheduling                pure: arithmetic over what was measured
inference.backends                  a concrete one is named by its registry alone
inference.sampling, text, observe   arithmetic, text, figures
inference.model                     contracts of models
inference.commit, request, tokens, settings, config, checkpoint_files, caller, errors
grpc_comm                           knows nothing of inference
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FOUNDATION = ("commit", "request", "tokens", "settings", "config", "checkpoint_files", "caller", "errors")
ROOMS = (
    ("model",),
    ("sampling", "text", "observe"),
    ("backends",),
    ("scheduling",),
    ("speculation",),
    ("engine",),
    ("vllm",),
    ("workers",),
    ("gateway",),
    ("serving",),
    ("cli",),
)
"""Rooms of one line may import each other and whatever stands above that line."""
HEIGHTS = {room: height for height, rooms in enumerate(ROOMS, start=1) for room in rooms}
MAY_SPEAK_GRPC = ("workers", "gateway", "serving", "cli")
SEEN_BY_COMPARISON = (
    *(
        "inference.config",
        "inference.checkpoint_files",
        "inference.settings",
        "inference.errors",
        "inference.request",
        "inference.commit",
    ),
    *("inference.observe.stats", "inference.text.chat", "inference.text.tokenizer"),
    *("inference.workers.completion", "inference.workers.convert", "inference.workers.remote"),
    *("inference.workers.dialling", "inference.workers.output", "inference.workers.status"),
    *("inference.serving.processes", "inference.serving.hub", "inference.cli"),
)
"""The command line, starting servers by it, and a client of their API with what it sends and receives."""
DOORS_OF_BACKENDS = ("inference.backends.registry", "inference.backends.identity")
ARITHMETIC = ("bisect", "enum", "hashlib", "heapq", "itertools", "math", "operator")
PURE = ("__future__", "collections", "dataclasses", *ARITHMETIC)
"""What scheduling/ may import beside the foundation: no clock, no loop, no model, no network."""


def layer_of(module: str) -> int:
    """Height of a module of inference; equal heights may import each other.

    Raises:
        KeyError: the module is in no room.
    """
    name = module.split(".")[1] if "." in module else ""
    return 0 if name in FOUNDATION or not name or name == "VERSION" else HEIGHTS[name]


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
    if is_in(name, "comparison"):
        return is_in(module, "comparison")
    if is_in(module, "comparison"):
        return not is_in(name, "inference") or any(is_in(name, seen) for seen in SEEN_BY_COMPARISON)
    if is_in(module, "grpc_comm"):
        return not is_in(name, "inference")
    if name.split(".")[0].startswith("grpc"):
        return package in MAY_SPEAK_GRPC
    if not is_in(name, "inference"):
        return package != "scheduling" or name.split(".")[0] in PURE
    if is_in(name, "inference.backends") and package != "backends":
        return layer_of(module) >= HEIGHTS["workers"] and any(is_in(name, door) for door in DOORS_OF_BACKENDS)
    return layer_of(name) <= layer_of(module)


def sources() -> list[Path]:
    files = [file for package in ("inference", "comparison", "grpc_comm") for file in (ROOT / package).rglob("*.py")]
    return sorted(file for file in files if "specdec/v1" not in file.as_posix())


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_point_downwards() -> None:
    files = sources()
    assert len(files) > 40
    found = [violation for file in files for violation in violations(module_name(file), file.read_text())]
    assert found == []


def test_no_module_imports_itself_by_a_detour() -> None:
    """Imports inside functions count too: such a cycle works only until the statement is moved."""
    names = {module_name(file): file for file in sources()}
    graph = {
        name: {known for imported in imports_of(name, file.read_text()) if (known := _module_of(imported, names))}
        for name, file in names.items()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def _module_of(imported: str, modules: Container[str]) -> str | None:
    """The module that an imported name is, or is in."""
    parent = imported.rpartition(".")[0]
    return next((name for name in (imported, parent) if name in modules), None)


def test_every_module_has_a_room() -> None:
    packages = {file.parent.name for file in (ROOT / "inference").glob("*/__init__.py")}
    modules = {file.stem for file in (ROOT / "inference").glob("*.py")} - {"__init__"}
    assert packages == set(HEIGHTS)
    assert modules == set(FOUNDATION)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("inference.engine.loop", "from inference.workers import completion"),
        ("inference.engine.target", "from inference.backends.pytorch.backend import TorchBackend"),
        ("inference.engine.target", "from inference.backends.registry import load_backend"),
        ("inference.speculation.tree", "import inference.backends.pytorch.backend"),
        ("inference.speculation.tree", "from inference.engine import loop"),
        ("inference.backends.pytorch.backend", "def f():\n    from inference.speculation import tree"),
        ("inference.workers.local", "from inference.cli import app"),
        ("inference.workers.local", "from inference.serving import assembly"),
        ("inference.serving.assembly", "from inference.backends.pytorch.backend import TorchBackend"),
        ("inference.cli.app", "from comparison.plan import grid"),
        ("inference.request", "from inference.observe import stats"),
        ("inference.sampling.noise", "import grpc"),
        ("inference.scheduling.waiting", "import asyncio"),
        ("inference.scheduling.waiting", "import time"),
        ("inference.scheduling.widths", "import numpy as np"),
        ("inference.scheduling.widths", "from inference.engine import loop"),
        ("inference.engine.loop", "from grpc_comm import channel"),
        ("inference.engine.loop", "from ..workers import completion"),
        ("grpc_comm.server", "from inference.errors import ConfigError"),
        ("grpc_comm.server", "import inference"),
        ("grpc_comm.server", "from comparison.run import proxy"),
        ("comparison.run.load", "from inference.engine import loop"),
        ("comparison.report.summary", "from inference.observe.profile import Profile"),
    ],
)
def test_planted_violations_are_found(module: str, statement: str) -> None:
    assert len(violations(module, f"import math\n{statement}\n")) == 1


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("inference.engine.loop", "from inference.engine import admission"),
        ("inference.engine.loop", "from inference.speculation.tree import DraftTree"),
        ("inference.serving.assembly", "from inference.backends.registry import load_backend"),
        ("inference.serving.assembly", "import grpc\nfrom grpc_comm.channel import open_channel"),
        ("inference.observe.profile", "from inference.observe.stats import RequestStats"),
        ("inference.scheduling.draft_length", "from inference.model.proposer import DraftToken"),
        ("grpc_comm.server", "import grpc"),
        ("comparison.run.load", "import asyncio\nfrom inference.workers.remote import RemoteCompleter"),
    ],
)
def test_downward_imports_are_allowed(module: str, statement: str) -> None:
    assert violations(module, statement) == []


MAY_SEE_FLAGS = ("inference.cli.flags", "inference.cli.config_file")


def names_parsed_flags(source: str) -> bool:
    """Whether a source names `argparse.Namespace`, or imports it under any name."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "Namespace")
        or (isinstance(node, ast.alias) and node.name in ("Namespace", "argparse.Namespace"))
        for node in ast.walk(ast.parse(source))
    )


def test_parsed_flags_stop_at_the_command_line() -> None:
    """From there on, configurations say what there is; a flag that is forgotten is a type error, not a default."""
    seeing = {module_name(file) for file in sources() if names_parsed_flags(file.read_text())}
    assert {module for module in seeing if not any(is_in(module, room) for room in MAY_SEE_FLAGS)} == set()
    assert "inference.cli.flags" in seeing


MAX_PARAMETERS = 5
FEW_PARAMETERS = re.compile(r"(Engine|Servicer|Server|Host|Front|Worker)$")


def test_what_is_built_of_many_parts_takes_configurations() -> None:
    """Constructors of engines, servicers and hosts have five parameters at most."""
    long = [
        f"{node.name} in {file.name}: {len(parameters)}"
        for file in sources()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and FEW_PARAMETERS.search(node.name)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if len(parameters := [*method.args.args[1:], *method.args.kwonlyargs]) > MAX_PARAMETERS
    ]
    assert long == []


def test_every_package_has_a_docstring() -> None:
    for file in (file for file in sources() if file.name == "__init__.py" and "grpc_comm" not in file.parts):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert "architecture.md" in text or ("Start reading: `" in text and ("not know" in text)), file


THIN = ("inference.workers.remote", "inference.serving.processes", "inference.cli.prompts.topologies", "main")


@pytest.mark.parametrize("module", THIN)
def test_thin_client_needs_no_model_library(module: str) -> None:
    """A machine that only sends requests has no torch, and does not wait for it to load."""
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers', 'onnx') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
