"""Test that the files and functions named on the page docs/architecture.md exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOPS = sorted(set(re.findall(r"`((?:inference|comparison|grpc_comm|tests|protos|docs)/[\w./]+?)(?::(\w+))?`", MAP)))


@cache
def names_in(file: Path) -> set[str]:
    """Return the functions, classes, methods and constants that a source defines."""
    defined = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return defined


def faults(hops: list[tuple[str, str]]) -> list[str]:
    missing = [path for path, _ in hops if not (ROOT / path).exists()]
    return missing + [
        f"{path}:{name}" for path, name in hops if name and path not in missing and name not in names_in(ROOT / path)
    ]


def test_every_place_on_the_map_exists() -> None:
    assert len(HOPS) > 60
    assert faults(HOPS) == []
