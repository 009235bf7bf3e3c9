"""Files that a process writes when it ends are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.inference.observe.files import write_whole


def test_a_file_that_cannot_be_written_to_its_end_is_removed() -> None:
    with pytest.raises(OSError, match="/dev/full"):
        write_whole(Path("/dev/full"), "text")


def test_a_file_that_cannot_be_opened_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened for writing is left as it is.

    Regression: `--trace FILE` removed an older read-only file.
    """
    (old := tmp_path / "old.json").write_text("old")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(PermissionError, match=r"old\.json"):
            write_whole(old, "new")
    assert old.read_text() == "old"
