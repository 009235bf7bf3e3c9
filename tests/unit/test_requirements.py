"""All lists of packages follow from pyproject.toml, and an installation takes no more than it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from scripts.requirements import oldest, requirements
from specdec.inference import VERSION
from specdec.inference.config import ROOT
from tests.test_layering import imports_of

CONTENT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONTENT["project"]
BASE, EXTRAS = PROJECT["dependencies"], PROJECT["optional-dependencies"]
TESTED = CONTENT["dependency-groups"]["tested"]
ELSEWHERE = (
    *("torch_neuronx", "neuronx_distributed", "neuronx_distributed_inference", "transformers_neuronx"),
    *("locust", "gevent"),
    *("vllm", "vllm_same_text", "msgspec", "triton"),
)
"""Packages that are imported only with extras that the environment of the tests lacks."""


@pytest.mark.parametrize("name", requirements())
def test_the_requirements_files_are_those_of_pyproject(name: str) -> None:
    assert (ROOT / name).read_text() == requirements()[name], "run `python -m scripts.requirements`"


def test_the_runtime_is_ranges_and_its_files_are_exact() -> None:
    """The package's dependencies are ranges of versions; the requirements files name exact versions.

    Regression: all versions were exact, so few packages could be installed beside this one.
    """
    for requirement in map(Requirement, EXTRAS["server"]):
        assert sorted(each.operator for each in requirement.specifier) == ["<=", ">="], requirement
    exact = [line for line in requirements()["requirements.txt"].splitlines() if not line.startswith("#")]
    assert len(exact) == len(BASE) + len(EXTRAS["server"])
    assert all("==" in line for line in exact)
    assert "fastapi==0.133.0" in oldest()


def test_the_base_has_wide_ranges_and_tested_versions() -> None:
    tested = {each.name: next(iter(each.specifier)).version for each in map(Requirement, TESTED)}
    for requirement in map(Requirement, BASE):
        assert sorted(each.operator for each in requirement.specifier) == ["<", ">="], requirement
        assert tested.pop(requirement.name) in requirement.specifier
    assert tested == {}


NEIGHBOURS = {
    "vLLM 0.32": "tokenizers==0.23.3 numpy==2.3.5 grpcio==1.85.3 grpcio-status==1.85.3 cryptography==50.0.2 "
    "protobuf==7.36.2 uvloop==0.23.0 rich==15.0.0 prometheus-client==0.26.0",
    "Roboflow's inference 1.8": "tokenizers==0.22.2 numpy==2.3.5 cryptography==50.0.2 protobuf==7.36.2 rich==14.3.4 "
    "prometheus-client==0.26.0",
}
"""Versions that pip chooses for other projects, of packages that this project's base dependencies include too."""


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_pip_leaves_a_neighbour_its_versions(neighbour: str) -> None:
    """Pip keeps the versions of other projects' packages if this package is installed beside them.

    Regression: all ranges ended at the tested version, so pip replaced vLLM's grpcio 1.85.3 by 1.85.1.
    """
    ranges = {each.name: each.specifier for each in map(Requirement, BASE)}
    for name, version in (each.split("==") for each in NEIGHBOURS[neighbour].split()):
        assert version in ranges[name], name


CLIENT_ALONE = """
import sys
from importlib.machinery import PathFinder

class Client(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        found = super().find_distributions(*context)
        return (each for each in found if each.name.lower().replace("_", "-") in INSTALLED)

sys.meta_path[sys.meta_path.index(PathFinder)] = Client
sys.argv[0] = "specdec"
"""
COMMAND = "from specdec import main; sys.exit(main())"
MODELS = """
import specdec
try:
    specdec.LLM()
except specdec.errors.MissingPackageError as error:
    sys.exit(f"{error}")
"""
LIBRARY = """
import specdec
from specdec.inference.errors import SpecDecError
chat = [{"role": "user", "content": "hello"}]
try:
    with specdec.Client("127.0.0.1:1", connect_timeout_s=0.1) as client:
        client.generate([chat], structured_outputs={"regex": "a"})
except SpecDecError as error:
    sys.exit(f"{error}")
"""


def run_as_client(code: str, *arguments: str) -> tuple[int, str]:
    """Run Python code that can import only packages of the base dependencies; return (exit code, stderr)."""
    blocked, installed = bare_environment()
    given = f"BLOCKED, INSTALLED = {blocked!r}, {installed!r}\n{CLIENT_ALONE}{code}"
    command = [sys.executable, "-c", given, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=150)
    return run.returncode, run.stderr


@cache
def bare_environment() -> tuple[set[str], set[str]]:
    """Return (modules that cannot be imported with the base dependencies alone, names of the installed packages)."""
    installed = closure({name_of(spec) for spec in BASE}) | {name_of(PROJECT["name"])}
    owners = packages_distributions()
    blocked = {module for module, names in owners.items() if not {name_of(each) for each in names} & installed}
    assert {"torch", "transformers", "fastapi", "pydantic", "onnxruntime", "matplotlib"} <= blocked
    return blocked, installed


def closure(names: set[str]) -> set[str]:
    """Return the names of these packages and of all their dependencies."""
    found: set[str] = set()
    while names:
        found |= names
        specs = [Requirement(spec) for name in names for spec in requires(name) or ()]
        names = {name_of(spec.name) for spec in specs if spec.marker is None or spec.marker.evaluate()} - found
    return found


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (COMMAND, ("fused_client", "--port", "1", "--connect_timeout_s", "0.1", "--prompt", "x")),
        (LIBRARY, ()),
    ],
    ids=["fused_client", "Client"],
)
def test_a_client_needs_no_more_than_the_base(code: str, arguments: tuple[str, ...]) -> None:
    """A client needs only the base dependencies.

    Regression: a client took 1.5 GB; later neither client started without packages of the server.
    """
    status, report = run_as_client(code, *arguments)
    assert (status, "no server answers" in report) == (1, True), report
    assert "Traceback" not in report


@pytest.mark.parametrize(
    ("code", "arguments", "status"),
    [
        *((COMMAND, each, 2) for each in ("gateway", "target", "verify_target --prompt x", "compare", "study")),
        (COMMAND, "rescale_fp8 --model a --output b", 2),
        (MODELS, "", 1),
    ],
)
def test_errors_of_a_thin_client_name_the_extra(code: str, arguments: str, status: int) -> None:
    """The error about a package that the base dependencies lack names the extra to install, in one line.

    Regression: each of these errors was a traceback.
    """
    code_of, report = run_as_client(code, *arguments.split())
    assert (code_of, len(report.splitlines())) == (status, 1), report
    assert "needs the extra `server` (`pip install 'specdec-serve[server]'`" in report


OLD_PYTHON = """#!/bin/sh
test "$1" = -c || {{ touch {folder}/went_on; exit 1; }}
exec {python} -c 'import sys; sys.version_info = (3, 10, 13, "final", 0); exec(sys.argv.pop(1))' "$2"
"""
REFUSAL = "specdec needs Python 3.11 to 3.14, {python} is 3.10"


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """Return a stand-in for Python 3.10, which makes the file `went_on` if it is asked for more than its version."""
    python = tmp_path / "python3.10"
    python.write_text(OLD_PYTHON.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("goal", ["demo", "install", "test", "test-python", "manifests", "lock"])
def test_make_refuses_an_old_python_before_it_downloads(goal: str, old_python: Path, tmp_path: Path) -> None:
    """Goals of the Makefile that need Python refuse an old one before they download anything.

    Regression: pip downloaded half a gigabyte of torch, and then blamed another package.
    """
    for file in ("Makefile", *requirements()):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    run = subprocess.run(
        ["make", goal, f"PYTHON={old_python}"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    hint = f"{REFUSAL.format(python=old_python)}: make {goal} PYTHON=python3.12"
    assert (run.returncode, run.stderr.splitlines()[0]) == (2, hint)
    assert not (tmp_path / "went_on").exists()


def test_pip_refuses_an_old_python_before_it_downloads() -> None:
    """Pip with an old Python ends with an error before it downloads anything.

    setup.py raises the error, since pip before version 24.1 checks requires-python only after all downloads.
    """
    code = "import runpy, sys; sys.version_info = (3, 10, 13); runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=150)
    assert (run.returncode, run.stderr.strip()) == (1, REFUSAL.format(python=sys.executable))


def test_refusals_name_the_supported_pythons() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])
    minors = [minor for minor in range(30) if f"3.{minor}" in supported]
    assert REFUSAL.startswith(f"specdec needs Python 3.{minors[0]} to 3.{minors[-1]},")
    assert PROJECT["classifiers"] == [f"Programming Language :: Python :: 3.{minor}" for minor in minors]


def test_code_pyproject_and_changelog_have_one_version() -> None:
    assert PROJECT["version"] == VERSION
    assert re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION


NEURON_IMAGES = {
    "2.27": ("2.9.0.2.11.19912", "0.7.15063", "4.56.2"),
    "2.28": ("2.8.0", "0.8.16251", "4.57.1"),
    "2.29": ("2.9.0.2.13", "0.9.17334", "4.57.6"),
    "2.31": ("2.9.0", "0.10.18399", "4.57.6"),
}
"""By version of Neuron's SDK: its torch-neuronx, its NxDI (NxD Inference), and a Transformers that this NxDI pins."""


@pytest.mark.parametrize("sdk", NEURON_IMAGES)
def test_pip_leaves_an_image_its_own_nxdi(sdk: str) -> None:
    """Pip keeps the NxDI (AWS's NxD Inference) of a Neuron container image.

    Regression: a pinned NxDI, or just a pinned Transformers, made pip replace the image's NxDI by another version.
    """
    wanted = {each.name: each for each in map(Requirement, EXTRAS["neuron"])}
    names = ("torch-neuronx", "neuronx-distributed-inference", "transformers")
    for name, version in zip(names, NEURON_IMAGES[sdk], strict=True):
        assert version in wanted[name].specifier


def test_pip_takes_no_torchneuron_for_nxdi() -> None:
    (torch_neuronx,) = (spec for spec in EXTRAS["neuron"] if name_of(spec) == "torch-neuronx")
    assert "2.13.3.0" not in Requirement(torch_neuronx).specifier


def name_of(spec: str) -> str:
    return re.split(r"[\s\[=<>;!~]", spec)[0].lower().replace("_", "-")


def test_every_imported_package_is_a_declared_dependency() -> None:
    """Every package that this project's modules import, anywhere in a file, is a declared dependency."""
    declared = {name_of(spec) for spec in BASE}
    for extra in ("server", "tracing", "endpoints"):
        declared |= {name_of(spec) for spec in EXTRAS[extra]}
    owners = packages_distributions()
    ours = {"specdec", "loadtest"}
    for package in ("inference", "grpc_comm", "comparison"):
        for path in (ROOT / "specdec" / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name in {each.split(".")[0] for each in imports_of(module, path.read_text())}:
                if name in ours | {*ELSEWHERE} | sys.stdlib_module_names or not name:
                    continue
                packages = {each.lower().replace("_", "-") for each in owners.get(name, [name])}
                assert packages & (declared | INDIRECT), f"{path.name} imports {name}, which pyproject.toml has not"


INDIRECT = {"starlette", "pydantic", "pydantic-core", "googleapis-common-protos"}
"""Packages that come with declared ones: the first three with FastAPI, the last one with grpcio-status."""
