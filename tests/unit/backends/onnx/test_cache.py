"""Cache on disk of the weights that backend onnx packs for its kernels: packing, use by processes, and deletion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.inference.backends import checkpoint
from specdec.inference.backends.onnx import layout, packed, packing
from specdec.inference.backends.onnx.backend import OnnxBackend, load_onnx_backend
from specdec.inference.backends.onnx.layout import LOCK_FILE, MAKING, FolderLock, remove_unused
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import Array, Span
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model

Patch = pytest.MonkeyPatch


@pytest.fixture
def model(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Save a model, and point the cache of packed weights to a folder of this test; return the model's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny_model(tmp_path / "model", "llama", seed=1)


def load(model: Path, **fields: Any) -> OnnxBackend:
    return load_onnx_backend(ModelConfig(model, num_threads=1, **fields))


def folder_of(model: Path, dtype: str = "float32") -> Path:
    return packed.folder_of(model, dtype)


def logits(backend: OnnxBackend, num_spans: int = 1) -> Array:
    return np.asarray(backend.forward([Span(slot, 0, [5, 6, 7], 1) for slot in range(num_spans)]))


def age(folder: Path) -> None:
    """Date a folder back so far that it counts as unused unless a process holds its lock."""
    old = time.time() - 10 * packing.SETTLED_S
    os.utime(folder, (old, old))


def test_weights_in_use_outlive_a_second_start(model: Path, monkeypatch: Patch) -> None:
    """Packed weights that a server uses are not deleted when another one starts.

    Regression: a second start deleted the first server's packed weights, and its next wide pass ended 16
    sessions.
    """
    first, folder = load(model, num_slots=8), folder_of(model)
    expected = logits(first)
    age(folder)
    monkeypatch.setattr(packed, "LAYOUT_VERSION", 999)  # an upgrade
    load(model)
    assert folder_of(model) != folder
    assert folder.exists()
    assert np.allclose(logits(first, 8), np.repeat(expected, 8, axis=0), atol=1e-4)
    del first  # and its lock
    remove_unused(folder)
    assert not folder.exists()


def test_other_weights_of_equal_date_are_noticed(model: Path, models: ModelDirectories) -> None:
    """Changed weights are packed again even if size and date are equal, and their old packed form is deleted.

    Regression: the cache compared sizes and dates only, so the old model answered under the new one's model_id.
    """
    before, old = logits(load(model)), folder_of(model)
    age(old)
    file, status = model / "model.safetensors", (model / "model.safetensors").stat()
    shutil.copyfile(models.related / "model.safetensors", file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert np.abs(logits(load(model)) - before).max() > 0.01
    assert not old.exists()


def test_weights_replaced_while_packing_are_not_used(model: Path, models: ModelDirectories, monkeypatch: Patch) -> None:
    """Weights that are replaced while they are packed are refused.

    Regression: weights that changed after they were hashed were stored in the cache under the old hash.
    """
    before = folder_of(model)

    def replaced(path: Path, *about: Any, **more: Any) -> Any:
        shutil.copyfile(models.related / "model.safetensors", path / "model.safetensors")
        return checkpoint.load_weights(path, *about, **more)

    monkeypatch.setattr(packing, "load_weights", replaced)
    with pytest.raises(ConfigError, match="replaced while"):
        load(model)
    assert not before.exists()
    load(model)


def test_checkpoints_are_packed_once_for_each_dtype(model: Path, monkeypatch: Patch) -> None:
    """Weights are packed once per dtype; a later start reads no original weights, even if only their date changed."""
    for dtype in ("float32", "int8"):
        load(model, dtype=dtype)
    os.utime(model / "model.safetensors")
    monkeypatch.setattr(packing, "load_weights", None)
    for dtype in ("float32", "int8"):
        load(model, dtype=dtype)
    small, large = (folder_of(model, dtype) / layout.WEIGHTS_FILE for dtype in ("int8", "float32"))
    assert small.stat().st_size < large.stat().st_size


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut short": (layout.WEIGHTS_FILE, lambda file: file.write_bytes(file.read_bytes()[:1000])),
    "zeros in place of weights": (layout.WEIGHTS_FILE, lambda file: file.write_bytes(bytes(file.stat().st_size))),
    "an empty graph": (layout.GRAPH_FILE, lambda file: file.write_bytes(b"")),
    **{
        f"no {name}": (name, Path.unlink)
        for name in (layout.GRAPH_FILE, layout.WEIGHTS_FILE, layout.SHAPE_FILE, layout.PROBE_FILE)
    },
}


@pytest.mark.parametrize(
    ("dtype", "name"), [*(("float32", name) for name in DAMAGES), ("int8", "zeros in place of weights")]
)
def test_a_damaged_packed_form_is_made_again(model: Path, dtype: str, name: str) -> None:
    """If a file in the cache of packed weights is damaged, the weights are packed again.

    `name` is a key of DAMAGES.

    Regression: with a damaged graph each start fell back to another backend, under the same model_id.
    """
    expected = logits(load(model, dtype=dtype))  # the backend is gone, and its lock
    file, damage = DAMAGES[name]
    damage(folder_of(model, dtype) / file)
    assert np.array_equal(logits(load(model, dtype=dtype)), expected)


def test_two_processes_may_pack_at_once(model: Path, monkeypatch: Patch) -> None:
    """Two processes may pack the same weights at once: the slower one uses the folder of the faster one."""
    load_weights = checkpoint.load_weights

    def overtaken(*about: Any, **more: Any) -> Any:
        monkeypatch.setattr(packing, "load_weights", load_weights)
        expected.append(logits(load(model)))  # as another process does
        return load_weights(*about, **more)

    expected: list[Array] = []
    monkeypatch.setattr(packing, "load_weights", overtaken)
    assert np.array_equal([logits(load(model))], expected)


def test_killed_builds_are_cleaned_up(model: Path) -> None:
    """The next start deletes the folder of a process that was killed while it packed weights.

    Regression: kill -9 during packing left 44 MB for ever. The folder of a process that is still packing stays,
    since that process has locked it.
    """
    parent = folder_of(model).parent
    killed, running = parent / f"{MAKING}killed", parent / f"{MAKING}running"
    for folder in (killed, running):
        folder.mkdir(parents=True)
        FolderLock(folder).close()
        age(folder)
    with closing(FolderLock(running, exclusive=True)):
        load(model)
        assert (killed.exists(), running.exists()) == (False, True)


def test_a_folder_under_deletion_is_not_read(model: Path, monkeypatch: Patch) -> None:
    """A folder of packed weights that is being deleted is not read.

    Regression: the lock's file was deleted first, so a server that started then read a folder that vanished.
    """
    load(model)
    folder, delete = folder_of(model), shutil.rmtree
    seen: list[bool] = []

    def slowly(place: Path, **_: object) -> None:
        (place / LOCK_FILE).unlink()
        seen.append(folder.exists())
        delete(place)

    monkeypatch.setattr("specdec.inference.backends.onnx.layout.shutil.rmtree", slowly)
    remove_unused(folder)
    assert seen == [False]
    assert list(folder.parent.iterdir()) == []


def test_a_read_only_cache_is_read(model: Path, monkeypatch: Patch) -> None:
    """A cache of packed weights that this user cannot write to is used all the same.

    Regression: a cache that root had made, for a container image, could not be locked, so every start packed the
    weights again and could not store them.
    """
    expected, opened = logits(load(model)), os.open

    def refuses_writing(file: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(13, "read-only", str(file))
        return opened(file, flags, mode)

    monkeypatch.setattr("specdec.inference.backends.onnx.layout.os.open", refuses_writing)
    monkeypatch.setattr(packing, "load_weights", None)
    assert np.array_equal(logits(load(model)), expected)
    remove_unused(folder_of(model))
    assert folder_of(model).exists()


def test_a_cache_that_cannot_be_written_is_named(model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot keep its packed weights in .*/file/specdec/onnx"):
        load(model)


def test_a_cache_that_all_users_may_write_to_is_refused(model: Path) -> None:
    load(model)
    folder_of(model).parents[1].chmod(0o777)
    with pytest.raises(ConfigError, match="anybody may write"):
        load(model)


def test_reading_needs_no_torch(model: Path) -> None:
    load(model)
    code = (
        "import sys; from pathlib import Path; from specdec.inference.config import ModelConfig\n"
        "from specdec.inference.backends.onnx.backend import load_onnx_backend as load\n"
        f"print(load(ModelConfig(Path({str(model)!r}), num_threads=1)).arithmetic, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["onnx", "float32", "cpu", "0", "False"]
