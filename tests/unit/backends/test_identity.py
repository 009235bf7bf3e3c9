"""Equal for copies of a model, different for any other."""

from __future__ import annotations

import shutil
from pathlib import Path

from inference.backends.identity import model_identity
from tests.conftest import ModelDirectories


def test_copies_are_one_model(models: ModelDirectories, tmp_path: Path) -> None:
    copy = shutil.copytree(models.target, tmp_path / "elsewhere")
    (copy / "README.md").write_text("about the model")
    assert model_identity(copy, "auto") == model_identity(models.target, "auto")


def test_other_weights_settings_or_arithmetic_are_another(models: ModelDirectories) -> None:
    directories = (models.target, models.related, models.stranger, models.endless)
    identities = {model_identity(path, dtype) for path in directories for dtype in ("float32", "int8")}
    assert len(identities) == 2 * len(directories)


def test_one_changed_block_of_a_large_file_shows(tmp_path: Path) -> None:
    """Training moves every weight; the samples lie all over the file."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1 << 20))
    before = model_identity(tmp_path)
    for place in (0, 1 << 19, (1 << 20) - 1):
        changed = bytearray(1 << 20)
        changed[max(0, place - 40_000) : place + 40_000] = b"x" * len(changed[max(0, place - 40_000) : place + 40_000])
        file.write_bytes(changed)
        assert model_identity(tmp_path) != before
