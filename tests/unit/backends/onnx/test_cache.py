"""Packed weights on disk: the processes that use them, and their deletion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.inference.backends import checkpoint
from specdec.inference.backends.onnx import packed, packing
from specdec.inference.backends.onnx.backend import OnnxBackend, load_onnx_backend
from specdec.inference.backends.onnx.layout import GRAPH_FILE, LOCK_FILE, MAKING, FolderLock, remove_unused
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import Array, Span
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a model with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny_model(tmp_path / "model", "llama", seed=1)


def logits(backend: OnnxBackend, num_spans: int) -> Array:
    return np.asarray(backend.forward([Span(slot, 0, [5, 6, 7], 1) for slot in range(num_spans)]))


def age(folder: Path) -> None:
    """Make a folder older than the grace for processes that have not locked it yet."""
    old = time.time() - 10 * packing.SETTLED_S
    os.utime(folder, (old, old))


def test_weights_in_use_outlive_a_second_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights that a server uses are not deleted when another server starts.

    It was once otherwise: a second start deleted the first server's packed weights, and its next wide pass ended 16
    sessions.
    """
    decoder = packed.packed_decoder(model, "float32", None)
    first, folder = OnnxBackend(decoder, num_slots=8, max_length=16, num_threads=1), decoder.folder
    expected = logits(first, 1)
    age(folder)
    monkeypatch.setattr(packed, "LAYOUT_VERSION", 999)  # an upgrade
    load_onnx_backend(ModelConfig(model, num_threads=1))
    assert packed.folder_of(model, "float32") != folder
    assert folder.exists()
    assert np.allclose(logits(first, 8), np.repeat(expected, 8, axis=0), atol=1e-4)
    decoder.lock.close()
    remove_unused(folder)
    assert not folder.exists()


def test_other_weights_of_equal_date_are_noticed(model: Path, models: ModelDirectories) -> None:
    """Weights with other content are packed again, even if size and date are the same.

    It was once otherwise: the cache went by size and date, so the old model answered under the new one's model_id.
    """
    before = logits(load_onnx_backend(ModelConfig(model, num_threads=1)), 1)
    file, status = model / "model.safetensors", (model / "model.safetensors").stat()
    shutil.copyfile(models.related / "model.safetensors", file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    after = logits(load_onnx_backend(ModelConfig(model, num_threads=1)), 1)
    assert np.abs(after - before).max() > 0.01


def test_weights_replaced_while_packing_are_not_used(
    model: Path, models: ModelDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are replaced while they are packed are refused.

    It was once otherwise: weights that changed between hash and packing lay in the cache under the old hash.
    """
    before = packed.folder_of(model, "float32")

    def replaced(path: Path, *about: Any, **more: Any) -> Any:
        shutil.copyfile(models.related / "model.safetensors", path / "model.safetensors")
        return checkpoint.load_weights(path, *about, **more)

    monkeypatch.setattr(packing, "load_weights", replaced)
    with pytest.raises(ConfigError, match="replaced while"):
        load_onnx_backend(ModelConfig(model, num_threads=1))
    assert not before.exists()
    load_onnx_backend(ModelConfig(model, num_threads=1))


def test_a_touched_checkpoint_is_not_packed_again(model: Path) -> None:
    folder = packed.packed_decoder(model, "float32", None).folder
    os.utime(model / "model.safetensors")
    assert packed.folder_of(model, "float32") == folder


def test_killed_builds_are_cleaned_up(model: Path) -> None:
    """The next start deletes the folder of a process that was killed while it packed weights.

    It was once otherwise: kill -9 during packing left 44 MB for ever. A process that is still packing has its folder
    locked.
    """
    parent = packed.folder_of(model, "float32").parent
    parent.mkdir(parents=True)
    killed, running = parent / f"{MAKING}killed", parent / f"{MAKING}running"
    for folder in (killed, running):
        folder.mkdir()
        FolderLock(folder).close()
        age(folder)
    with closing(FolderLock(running, exclusive=True)):
        load_onnx_backend(ModelConfig(model, num_threads=1))
        assert (killed.exists(), running.exists()) == (False, True)


def test_a_folder_under_deletion_is_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of packed weights that is being deleted is not read.

    It was once otherwise: the lock's file was deleted first, so a server that started then read a folder that vanished.
    """
    first = packed.packed_decoder(model, "float32", None)
    folder = first.folder
    first.lock.close()
    found: list[object] = []

    def slowly(place: Path, **_: object) -> None:
        (place / LOCK_FILE).unlink()
        try:
            found.append(packed.read(folder, "float32"))
        except FileNotFoundError as exc:
            found.append(exc)
        delete(place)

    delete = shutil.rmtree
    monkeypatch.setattr("specdec.inference.backends.onnx.layout.shutil.rmtree", slowly)
    remove_unused(folder)
    assert isinstance(found[0], FileNotFoundError)
    assert list(folder.parent.iterdir()) == []


def test_a_read_only_cache_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that this user cannot write is read all the same.

    It was once otherwise: a cache that root made for an image could not be locked, so every start packed again, in
    vain.
    """
    first = packed.packed_decoder(model, "float32", None)
    first.lock.close()
    opened = os.open

    def refuses_writing(file: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(13, "read-only", str(file))
        return opened(file, flags, mode)

    monkeypatch.setattr("specdec.inference.backends.onnx.layout.os.open", refuses_writing)
    second = packed.read(first.folder, "float32")
    remove_unused(first.folder)
    assert first.folder.exists()
    second.lock.close()


def test_an_empty_graph_is_made_again(model: Path) -> None:
    """A damaged graph in the cache is made again.

    It was once otherwise: with a damaged file each start fell back to another backend, under the same model_id.
    """
    expected = logits(load_onnx_backend(ModelConfig(model, num_threads=1)), 1)  # the backend is gone, and its lock
    (packed.folder_of(model, "float32") / GRAPH_FILE).write_bytes(b"")
    assert np.array_equal(logits(load_onnx_backend(ModelConfig(model, num_threads=1)), 1), expected)


def test_a_cache_that_all_users_may_write_to_is_refused(model: Path) -> None:
    load_onnx_backend(ModelConfig(model, num_threads=1))
    root = packed.folder_of(model, "float32").parents[1]
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="anybody may write"):
        load_onnx_backend(ModelConfig(model, num_threads=1))


def test_reading_needs_no_torch(model: Path) -> None:
    load_onnx_backend(ModelConfig(model, num_threads=1))
    code = (
        "import sys; from pathlib import Path; from specdec.inference.config import ModelConfig\n"
        "from specdec.inference.backends.onnx.backend import load_onnx_backend as load\n"
        f"print(load(ModelConfig(Path({str(model)!r}), num_threads=1)).arithmetic, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["onnx", "float32", "cpu", "0", "False"]
