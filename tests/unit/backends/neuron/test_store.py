"""The store of compiled models, on a local disk and on a stand-in for a mounted S3 bucket (Mountpoint)."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.inference.backends.neuron.storage import store, workshop
from specdec.inference.backends.neuron.storage.artifacts import Wanted, artifacts_root, find_or_compile
from specdec.inference.errors import ConfigError
from tests.support.mountpoint import Killed, Mountpoint
from tests.support.neuron.slot_models import checkpoint

WANTED = Wanted({"method": "vanilla", "neuron_config": {"batch_size": 2}}, ())
FILES = {"model.pt": b"graphs", "weights/tp0.safetensors": b"weights of the first", "weights/tp1.safetensors": b""}


def compile_into(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def never(_: Path) -> None:
    pytest.fail("it was there")


def contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    own = (store.MANIFEST, store.STARTED)
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files if file.name not in own}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def mounted(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mountpoint]:
    mountpoint = Mountpoint(root)
    mountpoint.mount(monkeypatch)
    yield mountpoint
    monkeypatch.undo()


@pytest.fixture(params=["disk", "mountpoint"])
def anywhere(request: pytest.FixtureRequest, root: Path) -> Path:
    if request.param == "mountpoint":
        request.getfixturevalue("mounted")
    return root


def test_a_published_model_is_found_by_all(anywhere: Path) -> None:
    """A compiled model is found at the next start, also in a folder of S3 Mountpoint.

    Regression: Mountpoint cannot rename folders, so a finished one was never found, and each start compiled
    again.
    """
    folder = find_or_compile(anywhere, WANTED, compile_into)
    assert folder.parent == anywhere / WANTED.key
    assert contents(folder) == FILES
    assert find_or_compile(anywhere, WANTED, never) == folder
    assert find_or_compile(folder, WANTED, never) == folder, "a model of ours may be named itself"
    (publication,) = store.publications(anywhere)
    assert publication.faults() == []


def test_two_publishers_leave_one_model(anywhere: Path) -> None:
    """If two processes publish the same model at once, both copies stay, and all readers take the same one."""
    first, second = store.begin(anywhere, WANTED.key), store.begin(anywhere, WANTED.key)
    for folder in (second, first):
        with workshop.workshop("key") as made:
            compile_into(made)
            store.publish(made, folder, WANTED.manifest)
    assert {find_or_compile(anywhere, WANTED, never) for _ in range(2)} == {min(first, second)}
    assert contents(first) == contents(second) == FILES


def test_a_slower_process_takes_the_faster_ones_model(anywhere: Path) -> None:
    faster: list[Path] = []

    def compile_while_another_finishes(folder: Path) -> None:
        compile_into(folder)
        faster.append(find_or_compile(anywhere, WANTED, compile_into))

    assert [find_or_compile(anywhere, WANTED, compile_while_another_finishes)] == faster


def test_a_killed_publisher_blocks_no_other_process(tmp_path: Path) -> None:
    """A process killed while it publishes a model blocks no other process: unfinished files are never read."""
    for moment in range(100):
        mountpoint = Mountpoint(tmp_path / f"store{moment}")
        with pytest.MonkeyPatch.context() as patch:
            mountpoint.mount(patch)
            mountpoint.killed_at = moment
            try:
                find_or_compile(mountpoint.root, WANTED, compile_into)
            except Killed:
                mountpoint.restart()
                left = store.find(mountpoint.root, WANTED.key)
                assert left is None, "killed before its manifest was closed"
            else:
                break
            assert contents(find_or_compile(mountpoint.root, WANTED, compile_into)) == FILES
    assert moment > 10, "folders, files, contents: each a moment of its own"


@pytest.mark.parametrize("name", [store.MANIFEST, "model.pt", "weights/tp0.safetensors"])
def test_a_truncated_file_hides_a_model(root: Path, name: str) -> None:
    folder = find_or_compile(root, WANTED, compile_into)
    (folder / name).write_bytes((folder / name).read_bytes()[:-3])
    assert store.find(root, WANTED.key) is None
    other = find_or_compile(root, WANTED, compile_into)
    (other / name).unlink()
    assert store.find(root, WANTED.key) is None


def test_a_read_only_store_refuses_before_compiling(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_or_compile(root, WANTED, compile_into)
    Mountpoint(root, is_read_only=True).mount(monkeypatch)
    assert find_or_compile(root, WANTED, never) == folder
    with pytest.raises(ConfigError, match=r"written to .*store, which has none of key .*Read-only file system"):
        find_or_compile(root, Wanted({"method": "another"}, ()), never)


def test_never_compiles_nothing_and_names_the_differences(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"--compile never\): there is no compiled model at all"):
        find_or_compile(root, WANTED, never, policy="never")
    find_or_compile(root, WANTED, compile_into)
    find_or_compile(root, Wanted({"method": "fused"}, ()), compile_into)
    other = Wanted({"method": "vanilla", "neuron_config": {"batch_size": 4}}, ())
    message = f"the nearest, {WANTED.key}, differs: neuron_config.batch_size 2 there, 4 asked$"
    with pytest.raises(ConfigError, match=message):
        find_or_compile(root, other, never, policy="never")
    (folder,) = (root / WANTED.key).iterdir()
    with pytest.raises(ConfigError, match=r"not for these settings: neuron_config.batch_size 2 there, 4 asked"):
        find_or_compile(folder, other, never)


def test_a_full_store_keeps_what_took_hours(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_bring", fill)
    with pytest.raises(ConfigError, match=r"No space left on device; it is kept in (.*)") as caught:
        find_or_compile(root, WANTED, compile_into)
    assert contents(Path(str(caught.value).split("kept in ")[1])) == FILES
    assert list(root.iterdir()) == []


def test_a_compilation_that_fails_leaves_nothing_in_the_store(anywhere: Path) -> None:
    def fail(folder: Path) -> None:
        raise ConfigError("neuronx-cc said no")

    with pytest.raises(ConfigError, match="said no"):
        find_or_compile(anywhere, WANTED, fail)
    assert store.find(anywhere, WANTED.key) is None


def test_the_compiler_works_in_the_users_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", f"{tmp_path}/compiling/")
    seen: list[str] = []

    def compile_and_look(folder: Path) -> None:
        seen.extend((os.environ["BASE_COMPILE_WORK_DIR"], str(folder)))
        compile_into(folder)

    find_or_compile(root, WANTED, compile_and_look)
    assert all(each.startswith(f"{tmp_path}/compiling/{WANTED.key}-") for each in seen)
    assert os.environ["BASE_COMPILE_WORK_DIR"] == f"{tmp_path}/compiling/"
    assert list((tmp_path / "compiling").iterdir()) == []


def test_a_long_compilation_shows_progress(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(workshop, "PROGRESS_S", 0.01)

    def compile_slowly(folder: Path) -> None:
        while f"compiled model {WANTED.key}: compiling for" not in caplog.text:
            time.sleep(0.005)

    find_or_compile(root, WANTED, compile_slowly)
    assert f"compiled model {WANTED.key}: compiled and stored in" in caplog.text


def test_artifacts_lie_in_the_flag_s_or_the_environment_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", "there")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert artifacts_root(tmp_path) == tmp_path
    assert artifacts_root(None) == Path("there")
    monkeypatch.delenv("NEURON_COMPILED_ARTIFACTS")
    assert artifacts_root(None) == Path("cache/specdec/neuron")


def key(path: Path, **description: object) -> str:
    return Wanted(description or {"a": 1}, (path,)).key


def test_a_key_depends_on_all_but_dates(tmp_path: Path) -> None:
    """The key of a compiled model depends on settings and the content of the weights, not on their dates.

    Regression: keys contained the times of weight files, so each pod that downloaded them compiled again.
    """
    path = checkpoint("llama")
    keys = {
        key(path),
        key(path, a=2),
        Wanted({"a": 1}, (path, path)).key,
        key(checkpoint("qwen3")),
        key(path / "config.json"),
    }
    assert len(keys) == 5
    assert key(path, a=1, b=2) == key(path, b=2, a=1)
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1, 1))
    assert key(copy) == key(path)
    quantized = [{"quantized": True, "quantized_checkpoints_path": where} for where in ("here", "there")]
    assert key(path, neuron_config=quantized[0]) == key(path, neuron_config=quantized[1])


def test_the_double_keeps_mountpoints_rules(mounted: Mountpoint) -> None:
    """The stand-in for Mountpoint refuses what Mountpoint refuses; without this, other tests could pass wrongly."""
    place, other = mounted.root / "file", mounted.root / "other"
    with place.open("xb", buffering=0) as file:
        file.write(b"one")
        assert not place.exists()
        with pytest.raises(OSError, match="out of order"):
            file.seek(0)
        os.fsync(file.fileno())
        with pytest.raises(OSError, match="after a sync"):
            file.write(b"two")
    assert place.read_bytes() == b"one"
    (mounted.root / "folder").mkdir()
    refused: list[Callable[[], object]] = [
        lambda: place.rename(other),
        lambda: os.replace(place, mounted.root.parent / "outside"),
        lambda: place.unlink(),
        lambda: (mounted.root / "folder").rmdir(),
        lambda: place.write_text("again"),
        lambda: place.open("a"),
        lambda: place.open("r+"),
        lambda: other.symlink_to(place),
        lambda: os.link(place, other),
        lambda: place.chmod(0o600),
        lambda: os.utime(place),
        lambda: other.touch(),
    ]
    for attempt in refused:
        with pytest.raises(OSError, match=str(mounted.root)):
            attempt()
    assert json.dumps(sorted(entry.name for entry in mounted.root.iterdir())) == '["file", "folder"]'
