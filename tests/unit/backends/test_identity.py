"""Copies of a model have equal model ids; other weights, settings or context lengths give different ids."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from specdec.inference.backends.identity import contents, model_id_of
from specdec.inference.config import ModelConfig
from specdec.inference.engine.target import TargetEngine
from specdec.inference.serving.assembly import RunningTarget
from specdec.inference.text.tokenizer import Tokenizer
from tests.conftest import ModelDirectories
from tests.support.scripted import ScriptedDecoder


def test_copies_are_one_model(models: ModelDirectories, tmp_path: Path) -> None:
    copy = shutil.copytree(models.target, tmp_path / "elsewhere")
    (copy / "README.md").write_text("about the model")
    assert model_id_of(copy, "auto") == model_id_of(models.target, "auto")


def test_other_weights_settings_or_arithmetic_are_another(models: ModelDirectories) -> None:
    directories = (models.target, models.related, models.stranger, models.endless)
    identities = {model_id_of(path, dtype) for path in directories for dtype in ("float32", "int8")}
    assert len(identities) == 2 * len(directories)


def test_another_context_is_another_model(models: ModelDirectories) -> None:
    """A model with another --sequence_length has another model id.

    Regression: a request was resumed at a server with the same model but a shorter --sequence_length, where its
    answer ended early.
    """
    tokenizer = Tokenizer.load(models.target)
    contexts = [TargetEngine(ScriptedDecoder(max_length=max_length)) for max_length in (100, 100, 200)]
    one, same, other = (RunningTarget(each, tokenizer).model_id(ModelConfig(models.target)) for each in contexts)
    assert one == same != other


def test_every_byte_counts_and_no_date(tmp_path: Path) -> None:
    """A model's id depends on every byte of its weights, and on no date.

    Regression: ids were made of samples of 4 KiB, which most edits of a layer did not touch.
    """
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1 << 20))
    before, status = model_id_of(tmp_path), file.stat()
    with file.open("r+b") as opened:
        opened.seek(123_456)
        opened.write(b"x")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns
    assert model_id_of(tmp_path) != before


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of weights is hashed only once; a file from a model hub is never hashed, since its name is its hash.

    Hashing hundreds of gigabytes at every start would take longer than loading them.
    """
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"more weights")
    (tmp_path / "shard.safetensors").symlink_to(blob)
    first = contents(tmp_path)
    assert dict(first)["shard.safetensors"] == "ab" * 32
    monkeypatch.setattr("specdec.inference.backends.digests.hashlib.file_digest", None)
    assert contents(tmp_path) == first
