"""Natural text from which the demo models learn: English prose files and the Python standard library.

Every source is split once, deterministically, into a training part and a held-out part; documents are plain
strings without special tokens.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_FRACTION = 0.05
SKIPPED_CODE_PARTS = frozenset(
    {
        "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "ensurepip",
        "pydoc_data", "turtledemo", "__phello__", "encodings", "config-3", "__pycache__",
    }
)  # fmt: skip
MAX_CODE_LINE = 160
MAX_FILE_BYTES = 250_000


@dataclass(frozen=True)
class Split:
    """Documents of one kind, for training and held out from it."""

    train: list[str]
    held_out: list[str]


def _unwrap(paragraph: str) -> str:
    """Join hard-wrapped prose lines; keep verse, tables of contents and speeches line by line."""
    lines = [line.rstrip() for line in paragraph.split("\n")]
    wrapped = len(lines) > 1 and min(len(line) for line in lines[:-1]) >= 50
    return " ".join(line.strip() for line in lines) if wrapped else "\n".join(lines)


def prose_paragraphs(text: str) -> list[str]:
    """Return the non-empty paragraphs of one book, in order, hard line wraps removed."""
    blocks = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    return [_unwrap(block.strip("\n")) for block in blocks if block.strip()]


def _group(paragraphs: list[str], rng: random.Random, low: int, high: int) -> list[str]:
    """Join consecutive paragraphs into documents of between `low` and `high` characters."""
    documents: list[str] = []
    current: list[str] = []
    size, goal = 0, rng.randint(low, high)
    for paragraph in paragraphs:
        current.append(paragraph)
        size += len(paragraph)
        if size >= goal:
            documents.append("\n\n".join(current))
            current, size, goal = [], 0, rng.randint(low, high)
    return documents + (["\n\n".join(current)] if current else [])


def load_prose(directory: Path, seed: int) -> Split:
    """Read every `*.txt` of `directory`; the last 5 % of each file's characters are held out."""
    rng = random.Random(seed)
    split = Split([], [])
    files = sorted(directory.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"no *.txt files in {directory}")
    for path in files:
        text = path.read_text(encoding="utf-8")
        cut = int(len(text) * (1 - HELD_OUT_FRACTION))
        split.train.extend(_group(prose_paragraphs(text[:cut]), rng, 200, 4000))
        split.held_out.extend(_group(prose_paragraphs(text[cut:])[1:], rng, 400, 2000))
    return split


def _usable_code(path: Path, root: Path) -> bool:
    """Whether a file is a hand-written module of moderate size, and no test, data table or bundled package."""
    parts = path.relative_to(root).parts
    if any(part in SKIPPED_CODE_PARTS or part.startswith("config-") for part in parts):
        return False
    return not path.name.startswith("_sysconfigdata") and 200 < path.stat().st_size < MAX_FILE_BYTES


def code_pieces(source: str) -> list[str]:
    """Cut one module at its top-level blank-line boundaries, so that documents begin at a statement."""
    pieces = re.split(r"\n\n+(?=(?:def|class|@|import|from|async def|if|try)\b|@)", source.strip("\n"))
    return [piece.rstrip() + "\n" for piece in pieces if piece.strip()]


def _code_documents(source: str, rng: random.Random) -> list[str]:
    """Join consecutive pieces of one module into documents of a few thousand characters at most."""
    if any(len(line) > MAX_CODE_LINE for line in source.splitlines()):
        return []
    documents: list[str] = []
    current, goal = "", rng.randint(200, 5000)
    for piece in code_pieces(source):
        current += ("\n\n" if current else "") + piece
        if len(current) >= goal:
            documents.append(current)
            current, goal = "", rng.randint(200, 5000)
    return documents + ([current] if current else [])


def load_code(seed: int) -> Split:
    """Read the running interpreter's standard library; about 5 % of the files are held out."""
    rng = random.Random(seed)
    root = Path(sysconfig.get_paths()["stdlib"])
    split = Split([], [])
    for path in sorted(root.rglob("*.py")):
        if not _usable_code(path, root):
            continue
        target = split.held_out if rng.random() < HELD_OUT_FRACTION else split.train
        target.extend(_code_documents(path.read_text(encoding="utf-8", errors="ignore"), rng))
    return split
