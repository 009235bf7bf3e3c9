"""Limits on the lines of code in each top folder, and in each package of inference/; these are called rooms.

Blank lines, docstrings, comments and imports do not count. `specdec/inference` and `specdec/grpc_comm` together are the
product, and have one more limit: what a feature adds is taken from elsewhere, or the limit is raised with the reason in
the commit. A room may grow by a twentieth past its number before its test fails.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
WEIGHTS: dict[str, int] = {
    "benchmarks": 2420,
    "comparison": 4460,
    "deploy": 700,
    "examples": 160,
    "grpc_comm": 880,
    "inference": 1240,
    "inference/backends": 3720,
    "inference/cli": 1420,
    "inference/engine": 1700,
    "inference/gateway": 2320,
    "inference/model": 200,
    "inference/observe": 680,
    "inference/sampling": 460,
    "inference/scheduling": 780,
    "inference/serving": 1240,
    "inference/speculation": 800,
    "inference/text": 1340,
    "inference/vllm": 1680,
    "inference/workers": 2720,
    "scripts": 800,
    "specdec": 540,
    "tests": 33780,
    "vllm_same_text": 220,
}
"""Lines of code of each room (folder). `python -m tests.test_weight` rewrites them, rounded up to the next twenty."""
PRODUCT = 21_050
"""Most lines of code that inference/ and grpc_comm/ may have together."""
AIR = 0.05
"""Share by which a room (folder) may grow past its number in `WEIGHTS` before the test fails."""
MAX_PAGE_LINES = 250
"""Most lines that a page of docs/ may have."""
SKIPPED = {"build", "reports", "venv", "v1"}
"""Names of folders whose code does not count, since it is generated or other people's."""


def num_code_lines(source: str) -> int:
    """Return the number of lines of code, without docstrings, comments, imports and blank lines."""
    lines = (line.strip() for line in source.split("\n"))
    code = {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant(str())):
                code -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code)


@cache
def weights() -> dict[str, int]:
    """Return the number of lines of code of each room (top folder or package of inference/), by its path."""
    found: Counter[str] = Counter()
    for file in ROOT.glob("[!.]*/**/*.py"):
        folders = file.relative_to(ROOT).parts[:-1]
        if SKIPPED.isdisjoint(folders) and not (ROOT / folders[0]).is_symlink():
            inner = folders[1:] if folders[0] == "specdec" and len(folders) > 1 else folders
            found["/".join(inner[: 2 if inner[0] == "inference" else 1])] += num_code_lines(file.read_text("utf-8"))
    return dict(found)


def product(found: Mapping[str, int]) -> int:
    return sum(lines for room, lines in found.items() if room.split("/")[0] in ("inference", "grpc_comm"))


def complaints(found: Mapping[str, int], table: Mapping[str, int]) -> list[str]:
    """Return a sentence for each room (folder) whose lines in `found` are too far from its number in `table`.

    That is over a twentieth above it, or a tenth or more, and 20 lines or more, below it.
    """
    heavy = (
        "{} weighs {}, {} more than its number: make it lighter, or raise the number and give the reason in the commit"
    )
    light = "{} weighs {}, {} less than its number: lower the number by `python -m tests.test_weight`"
    excess = {room: found.get(room, 0) - table.get(room, 0) for room in {**table, **found}}
    return [
        (heavy if more > 0 else light).format(room, found.get(room, 0), abs(more))
        for room, more in sorted(excess.items())
        if more > AIR * table.get(room, 0) or more <= -max(20, table[room] / 10)
    ]


def test_no_room_grows_unseen() -> None:
    assert complaints(weights(), WEIGHTS) == []


def test_the_product_keeps_its_weight() -> None:
    assert product(weights()) <= PRODUCT


def test_no_page_is_longer_than_a_reader_stays() -> None:
    lines = {page.name: page.read_text("utf-8").count("\n") for page in ROOT.glob("docs/**/*.md")}
    assert {name: number for name, number in lines.items() if number > MAX_PAGE_LINES} == {}


def test_heavier_new_lighter_and_lost_rooms_are_noticed() -> None:
    table = {"as it was": 200, "heavy": 200, "light": 200, "lost": 20}
    found = complaints({"as it was": 210, "heavy": 211, "light": 180, "new": 1}, table)
    assert [complaint.partition(" than")[0] for complaint in found] == [
        "heavy weighs 211, 11 more",
        "light weighs 180, 20 less",
        "lost weighs 0, 20 less",
        "new weighs 1, 1 more",
    ]


def test_blanks_comments_docstrings_and_imports_weigh_nothing() -> None:
    source = '"""Module."""\n\nimport re\nfrom a import (\n    b,\n)\n\nX = 1  # why\n"""Unit."""\n# a comment\n'
    assert num_code_lines(source + 'def f():\n    """Do."""\n    import io\n    return """two\nlines"""\n') == 4


if __name__ == "__main__":
    table = "".join(f'    "{room}": {now + -now % 20},\n' for room, now in sorted(weights().items()))
    source = Path(__file__).read_text("utf-8")
    Path(__file__).write_text(re.sub(r"(?s)(\nWEIGHTS[^{]*\{).*?\}", rf"\1\n{table}}}", source, count=1), "utf-8")
