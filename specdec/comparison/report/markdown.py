"""Tables of Markdown pages, and the parts of pages that commands write: `<!-- bench: NAME -->` to `<!-- /bench -->`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.inference.config import ROOT
from specdec.inference.errors import ConfigError

PART = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = (header, ["-" * width for width in widths], *rows)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in lines
    )


def page_part(place: str) -> tuple[Path, str]:
    """Split FILE#NAME into a page's file and the name of a part that the page has.

    Raises:
        ConfigError: the file cannot be read, or has no part of this name.
    """
    file, _, name = place.partition("#")
    try:
        names = [found[2] for found in PART.finditer(Path(file).read_text(encoding="utf-8"))]
    except OSError as error:
        raise ConfigError(f"page {file} cannot be read: {error}") from error
    if name not in names:
        raise ConfigError(f"page {place}: the file has the parts {', '.join(names) or 'none'}, as <!-- bench: NAME -->")
    return Path(file), name


def write_part(place: str, text: str, program: str = "specdec compare") -> None:
    """Write a text into the part FILE#NAME of a Markdown page, below a line with the command and the commit.

    Args:
        place: the part, as FILE#NAME.
        program: the command without its flags, which are taken from this process's arguments.

    Raises:
        ConfigError: the file cannot be read, or has no part of this name.
    """
    file, name = page_part(place)
    words = (word.replace(f"{ROOT}/", "") for word in sys.argv[1:])
    text = f"`{program} {shlex.join(words)}`, commit {commit()}.\n\n{text}"
    old = file.read_text(encoding="utf-8")
    new = PART.sub(lambda found: f"{found[1]}{text}\n{found[3]}" if found[2] == name else found[0], old)
    file.write_text(new, encoding="utf-8")


def commit() -> str:
    """Return the commit of this checkout, with "-dirty" if a file outside docs/ differs; "unknown" without git."""
    head = _git("rev-parse", "--short", "HEAD")
    return head + ("-dirty" if head and _git("status", "--porcelain", "-uno", "--", ".", ":!docs") else "") or "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
