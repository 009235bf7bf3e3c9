"""Tests of `pip install .`: the wheel in its own environment, also beside another project's package `inference`."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from functools import partial
from pathlib import Path

import httpx
import pytest

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port
from tests.conftest import ModelDirectories
from tests.support.servers import target_server, until_healthy

pytestmark = pytest.mark.long

SOURCES = ("specdec", "models", "prompts", "pyproject.toml", "setup.py", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
BYTECODE = shutil.ignore_patterns("__pycache__")
"""Argument of `shutil.copytree` that leaves out bytecode, since other processes write it meanwhile."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build this project's wheel; return its path."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in SOURCES:  # a copy with its links, since a build leaves its own files in the tree
        copy = partial(shutil.copytree, symlinks=True, ignore=BYTECODE) if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*PIP, "wheel", "--quiet", *offline, "--wheel-dir", home, source], check=True)
    (made,) = home.glob("specdec_serve-*.whl")
    return made


def environment_with(home: Path, *asked: str | Path) -> Path:
    """Make a virtual environment below `home`, and install `asked`, arguments of `pip install`; return its folder."""
    venv.create(home / "env", with_pip=False)
    python = home / "env" / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--quiet", "--no-compile", *asked], check=True)
    return home / "env"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a virtual environment with this project's wheel; return its folder.

    Its dependencies come from the tests' environment by a .pth file; tests/unit/test_requirements.py checks that the
    wheel declares them.
    """
    made = environment_with(tmp_path_factory.mktemp("install"), "--no-deps", "--no-index", wheel)
    packages = next(made.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return made


def variables(**more: str) -> dict[str, str]:
    """Return this process's environment variables, without those by which Python would import this checkout.

    `more` are added.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


RIGHT = """
import specdec
from specdec.parameters import Parameters
from specdec.testing import ScriptedCompleter, serving

with specdec.LLM(dtype="int8", batch=4, compiled_model_path=None) as llm:
    results: list[specdec.Result] = llm.generate(["1, 2,"], temperature=1, seed=7, stop="x", logit_bias={5: 1.0})
    text: str = results[0].text
    for part in llm.stream([1, 2, 3], structured_outputs={"regex": "a"}):
        piece: str = part.text
    speed_up: float = llm.compare("x", max_new_tokens=3).speed_up
asked: Parameters = {"max_new_tokens": 3, "stop_token_ids": [3]}
with serving(ScriptedCompleter([["a"]])) as server, specdec.Client(server.address, tls_ca="ca.pem") as client:
    client.generate([{"role": "user", "content": "x"}], **asked)


async def main() -> None:
    async with specdec.AsyncLLM(specdec.BUNDLED_TARGET) as own, specdec.AsyncClient() as other:
        [result] = await own.generate("x", **asked)
        pieces: list[str] = [part.text async for part in other.stream("x", gamma=0)]


try:
    pass
except specdec.errors.CapacityError as error:
    again_s: float = error.retry_after_s
"""
WRONG = """
import specdec
with specdec.LLM() as llm, specdec.Client() as client:
    llm.generate("x", max_new_tokenz=3)
    llm.generate("x", temperature="hot")
    llm.stream("x", stop=3)
    client.compare("x", sede=7)
    client.generate(5)
    number: int = llm.generate("x")[0].text
    specdec.LLM(dtyp="int8")
    specdec.AsyncLLM(batch="many")
    specdec.Client(tls_cert="x")
    specdec.AsyncClient(port="x")
    specdec.generate("x")
"""
CHECKERS: dict[str, tuple[str, ...]] = {
    "mypy": ("-m", "mypy", "--strict", "--cache-dir", "cache", "--python-executable"),
    "pyright": ("-m", "pyright", "--pythonpath"),
}


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.release), "pyright"])
@pytest.mark.timeout(600)
def test_a_users_script_is_checked(environment: Path, tmp_path: Path, checker: str) -> None:
    """Type checkers accept the right calls of the library, and find each wrong name and each wrong type.

    Regression: the wheel had no types for mypy, and pyright accepted every name of a parameter.
    """
    if checker == "pyright" and shutil.which("node") is None:
        pytest.skip("pyright is a program for node, which is not installed")
    for name, script in (("right", RIGHT), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(script)
    command = [sys.executable, *CHECKERS[checker], str(environment / "bin" / "python"), "right.py", "wrong.py"]
    run = subprocess.run(command, cwd=tmp_path, env=variables(), capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    found = set(re.findall(r"(right|wrong)\.py:(\d+):.*error", run.stdout))
    assert found == {("wrong", str(line)) for line in range(4, WRONG.count("\n") + 1)}, run.stdout


TESTED = ("--constraint", ROOT / "requirements.txt")


@pytest.mark.parametrize(
    "is_alone", [pytest.param(True, marks=pytest.mark.release), False], ids=["empty environment", "beside others"]
)
@pytest.mark.timeout(1800)  # downloads torch, and beside others' work unpacks it for a quarter of an hour
async def test_a_wheel_serves_what_it_brings(is_alone: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The wheel serves the bundled models, both beside the tests' packages and with nothing but its extra `server`."""
    if is_alone:
        wheel = request.getfixturevalue("wheel")
        home = await asyncio.to_thread(environment_with, tmp_path, *TESTED, f"{wheel}[server]")
    else:
        home = request.getfixturevalue("environment")
    port, http_port = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        home / "bin" / "specdec", "fused_target", "--port", str(port), "--http_port", str(http_port),
        cwd=tmp_path, env=variables(), stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until_healthy(http_port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as client:
            body = {"prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"].startswith(" 4, 5")
            assert "Speculative decoding" in (await client.get("/")).text, "the page is in the wheel"
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


ASKING = """
import sys, specdec
with specdec.Client(sys.argv[1]) as client:
    chat = [{"role": "user", "content": "hello"}]
    for prompt in ("a house", chat):
        (result,) = client.generate([prompt], max_new_tokens=4, structured_outputs={"regex": "[ab]{3}"})
        print(result.text)
"""


@pytest.mark.release
async def test_a_client_needs_the_base_alone(wheel: Path, tmp_path: Path, models: ModelDirectories) -> None:
    """The command-line client and the library's client work with the package's base dependencies, without any extra.

    Regression: both clients imported llguidance and Pydantic, which the base lacks, and ended at once.
    """
    client = (await asyncio.to_thread(environment_with, tmp_path, *TESTED, wheel)) / "bin"
    async with target_server(models.chat_target) as server:
        flags = ("--port", str(server.port), "--prompt", "a house", "--max_new_tokens", "4", "--format", "json")
        for command in (
            (client / "specdec", "fused_client", *flags),
            (client / "python", "-c", ASKING, server.address),
        ):
            run = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, cwd=tmp_path, env=variables(), timeout=120
            )
            assert run.returncode == 0, run.stderr
            assert run.stdout.strip()


def test_one_name_is_in_the_wheel(wheel: Path) -> None:
    """The wheel contains one top-level package, `specdec`.

    Regression: the wheel had four, and one of them, `inference`, has the name of another project's.
    """
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".data/" not in name and ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"specdec"}
    assert {file.relative_to(ROOT).as_posix() for file in (ROOT / "specdec").rglob("*.py")} <= names


def test_packages_and_prompts_of_comparisons_are_in_the_wheel(environment: Path, tmp_path: Path) -> None:
    """The installed commands `compare` and `study` have their prompts and their HTML template.

    Regression: both looked for their prompts at a path that only a clone of the repository has.
    """
    code = "import specdec.comparison.report.html as html, specdec.comparison.app as app; html.template()\n"
    code += "from specdec.comparison.plan.flags import BUNDLED_PROMPT_FILES as files\n"
    code += "print([each.is_file() for each in files]); app.main(['--help'])"
    command: list[str | Path] = [environment / "bin" / "python", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables())
    assert (run.returncode, run.stdout.splitlines()[0]) == (0, "[True, True]"), run.stderr
    assert "--topologies" in run.stdout


def test_a_strangers_inference_is_left_alone(environment: Path, tmp_path: Path) -> None:
    """Another project's package `inference` works beside this project's wheel.

    Regression: if Roboflow's `inference` and this wheel were both installed, one of them did not work.
    """
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "__init__.py").write_text("raise ImportError('never run')")
    run = subprocess.run(
        [environment / "bin" / "specdec", "verify_target", "--prompt", "1, 2, 3,", "--max_new_tokens", "4"],
        capture_output=True, text=True, env=variables(PYTHONPATH=str(tmp_path)), timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_make_brings_the_command_of_its_checkout(tmp_path: Path) -> None:
    """`make install` puts the command `specdec` into the environment, except where .venv is a link to another one.

    Regression: every page says `specdec ...`, and a clone had no such command after `make demo` or `make install`.
    """
    checkout, own = tmp_path / "checkout", shutil.ignore_patterns(".*", "build", "reports", "*.egg-info")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=own)
    made = tmp_path / "env"
    venv.create(made, with_pip=False)
    (next(made.glob("lib/python*/site-packages")) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    files = [checkout / name for name in ("requirements.txt", "requirements/dev.txt")]
    (made / ".installed").write_text("".join(file.read_text() for file in files))  # nothing is to be installed
    offline = "PIP=-m pip install --disable-pip-version-check --no-build-isolation --no-index"
    make = ("make", "--directory", str(checkout), "install", offline)
    (checkout / ".venv").symlink_to(made)
    subprocess.run(make, check=True)
    assert not (made / "bin" / "specdec").exists()
    subprocess.run([*make, f"VENV={made}"], check=True)
    said = subprocess.run([made / "bin" / "specdec", "--version"], cwd=tmp_path, check=True, capture_output=True)
    assert said.stdout.decode().startswith("specdec ")
    where = [str(made / "bin" / "python"), "-c", "import specdec; print(specdec.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, check=True, capture_output=True).stdout.decode()
    assert Path(found.strip()) == checkout / "specdec" / "__init__.py"
