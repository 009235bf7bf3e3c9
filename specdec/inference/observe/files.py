"""Files that a process writes at its end."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file completely, or leave none: if that fails, what stands at the path is removed.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    try:
        path.write_text(text)
    except OSError as exc:
        if path.is_file():
            path.unlink()
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
