"""Writing of the files that a process leaves at its end."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file completely; if writing fails half-way, as on a full disk, remove the file.

    A file that cannot be opened for writing stays as it is.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    is_open = False
    try:
        with path.open("w") as file:
            is_open = True
            file.write(text)
    except OSError as exc:
        if is_open and path.is_file():
            path.unlink()
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
