"""Modules import only from their own layer and lower ones, as in docs/architecture.md, here highest first.

main.py, compare_architectures.py, specdec/*.py
specdec.comparison                          knows servers by their command line, their API, and the foundation
specdec.inference.cli
specdec.inference.serving
specdec.inference.gateway
specdec.inference.workers
specdec.inference.vllm                      vLLM as an engine: the same contract, in vLLM's own environment
specdec.inference.engine
specdec.inference.speculation
specdec.inference.scheduling                pure: arithmetic over what was measured
specdec.inference.backends                  only their registry names a concrete one
specdec.inference.sampling, text, observe   arithmetic, text, figures
specdec.inference.model                     contracts of models
specdec.inference.commit, request, tokens, declared, settings, config, checkpoint_files, caller, errors
specdec.grpc_comm                           knows nothing of inference
"""

from __future__ import annotations

import ast
import operator
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FOLDERS = ("inference", "grpc_comm", "comparison")
"""Packages in `specdec`; importing one of their modules without `specdec.` in front would load a second copy of it."""
HOUSE = ("specdec", "benchmarks", "deploy", "examples", "models", "scripts", "tests")
FOUNDATION = ("commit", "request", "tokens", "declared", "settings", "config", "checkpoint_files", "caller", "errors")
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
"""Packages of specdec/inference by layer, lowest first; a package may import those of its own and of lower layers."""
HEIGHTS = {room: height for height, rooms in enumerate(ROOMS, start=1) for room in rooms}
MAY_SPEAK_GRPC = ("workers", "gateway", "serving", "cli")
FLOORS = {
    "specdec.inference.gateway": ("bodies", "answers", "door"),
    "specdec.inference.workers": ("completion", "calls", "completing", "drafting"),
    "specdec.comparison": ("plan", "run", "report", "study"),
}
"""Layers within a package, lowest first; a module may import its own and lower ones, one in no layer all of them."""
SEEN_BY_COMPARISON = (
    *(f"specdec.inference.{module}" for module in FOUNDATION),
    *("specdec.inference.observe.stats", "specdec.inference.observe.host_load"),
    *("specdec.inference.text.chat", "specdec.inference.text.tokenizer"),
    *(
        "specdec.inference.workers.completion",
        "specdec.inference.workers.calls.convert",
        "specdec.inference.workers.completing.remote",
    ),
    *(
        "specdec.inference.workers.calls.dialling",
        "specdec.inference.workers.completing.output",
        "specdec.inference.workers.calls.status",
    ),
    *(f"specdec.inference.serving.{module}" for module in ("processes", "hub", "models")),
    "specdec.inference.cli",
)
"""Modules of specdec/inference that comparison/ may import: foundation, command line, processes, and API client."""
DOORS_OF_BACKENDS = ("specdec.inference.backends.registry", "specdec.inference.backends.identity")
CONCRETE_BACKENDS = tuple(f"specdec.inference.backends.{name}" for name in ("onnx", "pytorch", "neuron"))
ARITHMETIC = ("bisect", "enum", "hashlib", "heapq", "itertools", "math", "operator", "statistics")
PURE = ("__future__", "collections", "dataclasses", *ARITHMETIC)
"""Modules of other projects that scheduling/ may import: no clock, no event loop, no model, no network."""


def layer_of(module: str) -> int:
    """Return the number of a module's layer in specdec/inference, 0 for the lowest.

    Raises:
        KeyError: the module is in no layer.
    """
    name = f"{module}..".split(".")[2]
    return 0 if name in FOUNDATION or not name or name == "VERSION" else HEIGHTS[name]


parsed = cache(ast.parse)


def imports_of(module: str, source: str) -> Iterator[str]:
    """Yield the full names of all modules, or names in modules, that a source imports, also inside functions."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(module: str, source: str) -> list[str]:
    """Return a sentence for each import in `source` that the layers forbid to the module named `module`."""
    return [f"{module} imports {name}" for name in imports_of(module, source) if not is_allowed(module, name)]


def floors_of(module: str, name: str) -> tuple[int, int]:
    """Return the layers of `module` and of `name` in the package of `FLOORS` that has both; (0, 0) if none has."""
    for package, rooms in FLOORS.items():
        if is_in(module, package) and is_in(name, package):
            of_module, of_name = (
                next((floor for floor, room in enumerate(rooms) if is_in(each, f"{package}.{room}")), len(rooms))
                for each in (module, name)
            )
            return of_module, of_name
    return 0, 0


def is_allowed(module: str, name: str) -> bool:
    if operator.lt(*floors_of(module, name)):
        return False
    package = f"{module}..".split(".")[2] if is_in(module, "specdec.inference") else ""
    is_ours = name.split(".")[0] in (*FOLDERS, "specdec")
    if is_ours and not any(is_in(name, f"specdec.{folder}") for folder in FOLDERS):
        return False
    if is_in(name, "specdec.comparison"):
        return is_in(module, "specdec.comparison")
    if is_in(module, "specdec.comparison"):
        return not is_in(name, "specdec.inference") or any(is_in(name, seen) for seen in SEEN_BY_COMPARISON)
    if is_in(module, "specdec.grpc_comm"):
        return not is_in(name, "specdec.inference")
    if is_in(name, "specdec.grpc_comm") or name.split(".")[0].startswith("grpc"):
        return package in MAY_SPEAK_GRPC
    if not is_in(name, "specdec.inference"):
        return package != "scheduling" or name.split(".")[0] in PURE
    if any(is_in(name, backend) and not is_in(module, backend) for backend in CONCRETE_BACKENDS):
        return module == "specdec.inference.backends.registry"
    if is_in(name, "specdec.inference.backends") and package != "backends":
        return layer_of(module) >= HEIGHTS["workers"] and any(is_in(name, door) for door in DOORS_OF_BACKENDS)
    return layer_of(name) <= layer_of(module)


def sources() -> list[Path]:
    files = [file for package in FOLDERS for file in (ROOT / "specdec" / package).rglob("*.py")]
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
    """No module imports itself through other modules, not even by imports inside functions.

    A cycle of imports inside functions works only until one of them is moved to the top of its file.
    """
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
    """Return the module among `modules` that is the imported name, or contains it; None if there is none."""
    parent = imported.rpartition(".")[0]
    return next((name for name in (imported, parent) if name in modules), None)


IMPORT = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(FOLDERS)})\b", re.MULTILINE)
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})\.\w+")


def test_no_source_names_a_module_by_its_folder() -> None:
    """No source names a module as `inference.x`, `grpc_comm.x` or `comparison.x`, without `specdec.` in front.

    Importing it so would load a second copy, with its own classes, whose metrics are refused as duplicates.
    """
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in [*ROOT.glob("*.py"), *(file for room in HOUSE for file in (ROOT / room).rglob("*.py"))]
        for text in [file.read_text()]
        for name in [*IMPORT.findall(text), *filter(_is_module, MODULE.findall(text))]
    ]
    assert found == []


def _is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


def test_every_module_has_a_room() -> None:
    packages = {file.parent.name for file in (ROOT / "specdec" / "inference").glob("*/__init__.py")}
    modules = {file.stem for file in (ROOT / "specdec" / "inference").glob("*.py")} - {"__init__"}
    assert packages == set(HEIGHTS)
    assert modules == set(FOUNDATION)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("specdec.inference.engine.loop", "from specdec.inference.workers import completion"),
        ("specdec.inference.engine.target", "from specdec.inference.backends.pytorch.backend import TorchBackend"),
        ("specdec.inference.engine.target", "from specdec.inference.backends.registry import load_backend"),
        ("specdec.inference.backends.pytorch.backend", "def f():\n    from specdec.inference.speculation import tree"),
        (
            "specdec.inference.backends.pytorch.backend",
            "from specdec.inference.backends.neuron.environment import toolchain",
        ),
        ("specdec.inference.backends.devices", "from specdec.inference.backends.pytorch.shapes import Buckets"),
        ("specdec.inference.cli.app", "from specdec.comparison.plan import grid"),
        ("specdec.inference.request", "from specdec.inference.observe import stats"),
        ("specdec.inference.sampling.noise", "import grpc"),
        ("specdec.inference.scheduling.waiting", "import asyncio"),
        ("specdec.inference.scheduling.widths", "import numpy as np"),
        ("specdec.inference.engine.loop", "from ..workers import completion"),
        ("specdec.inference.engine.loop", f"import {FOLDERS[0]}"),
        ("specdec.inference.cli.app", "from specdec import library"),
        ("specdec.grpc_comm.server", "from specdec.inference.errors import ConfigError"),
        ("specdec.inference.gateway.bodies.schema", "from specdec.inference.gateway.answers.errors import ApiError"),
        ("specdec.comparison.run.load", "from specdec.inference.engine import loop"),
        ("specdec.comparison.plan.grid", "from specdec.comparison.run import load"),
        ("specdec.comparison.report.summary", "from specdec.inference.observe.profile import Profile"),
    ],
)
def test_planted_violations_are_found(module: str, statement: str) -> None:
    assert len(violations(module, f"import math\n{statement}\n")) == 1


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("specdec.inference.engine.loop", "from specdec.inference.engine import admission"),
        ("specdec.inference.engine.loop", "from specdec.inference.speculation.tree import DraftTree"),
        ("specdec.inference.serving.assembly", "from specdec.inference.backends.registry import load_backend"),
        ("specdec.inference.serving.assembly", "import grpc\nfrom specdec.grpc_comm.channel import open_channel"),
        ("specdec.inference.observe.profile", "from specdec.inference.observe.stats import RequestStats"),
        ("specdec.inference.scheduling.draft_length", "from specdec.inference.model.proposer import DraftToken"),
        ("specdec.grpc_comm.server", "import grpc"),
        (
            "specdec.comparison.run.load",
            "import asyncio\nfrom specdec.inference.workers.completing.remote import RemoteCompleter",
        ),
    ],
)
def test_downward_imports_are_allowed(module: str, statement: str) -> None:
    assert violations(module, statement) == []


MAY_SEE_FLAGS = ("specdec.inference.cli.flags", "specdec.inference.cli.config_file")


def names_parsed_flags(source: str) -> bool:
    """Return whether a source names `argparse.Namespace`, as an attribute or in an import."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "Namespace")
        or (isinstance(node, ast.alias) and node.name in ("Namespace", "argparse.Namespace"))
        for node in ast.walk(parsed(source))
    )


def test_parsed_flags_stop_at_the_command_line() -> None:
    """Only the command line's packages use `argparse.Namespace`; others take typed configurations.

    So a flag that is forgotten there is a type error.
    """
    seeing = {module_name(file) for file in sources() if names_parsed_flags(file.read_text())}
    assert {module for module in seeing if not any(is_in(module, room) for room in MAY_SEE_FLAGS)} == set()
    assert "specdec.inference.cli.flags" in seeing


@pytest.mark.parametrize("module", ["specdec.library", "specdec.testing"])
def test_the_library_needs_no_command_line(module: str) -> None:
    """Importing the library imports nothing of the command line."""
    names = "[name for name in sys.modules if name.startswith('specdec.inference.cli')]"
    code = f"import sys, {module}; print({names})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_package_has_a_docstring() -> None:
    for file in (file for file in sources() if file.name == "__init__.py" and "grpc_comm" not in file.parts):
        text = ast.get_docstring(parsed(file.read_text())) or ""
        assert "architecture.md" in text or ("Start reading: `" in text and ("not know" in text)), file


THIN = (
    "specdec.inference.workers.completing.remote",
    "specdec.inference.serving.processes",
    "specdec.inference.cli.prompts.topologies",
    "main",
)


@pytest.mark.parametrize("module", THIN)
def test_thin_client_needs_no_model_library(module: str) -> None:
    """Client modules import no model library: a machine that only sends requests needs no torch."""
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers', 'onnx') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
