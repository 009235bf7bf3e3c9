"""Tests of all pages of the documentation: links lead somewhere, named tests exist, tables and lists are whole."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "models" / "README.md"])
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def prose(page: Path) -> str:
    """Return the page's text without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the page's headings, and those that the page writes as HTML."""
    seen: Counter[str] = Counter()
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", prose(page)))
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """Return the page's relative links to a file, or a heading in a file, that does not exist."""
    links = ("".join(link) for link in LINK.findall(prose(page)))
    return [link for link in links if not re.match(r"[a-z]+:", link) and not _exists(page, link)]


def _exists(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    """Every relative link on a page leads to a file and a heading that exist.

    Regression: docs/reliability.md linked to a section that had been removed with its feature.
    """
    assert broken_links(page) == []


def test_every_named_test_exists() -> None:
    """Every test that docs/reliability.md names for a promise exists, also after tests were renamed."""
    defined = set(re.findall(r"def (test_\w+)", "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))))
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named, files = set(re.findall(r"`(test_\w+)`", page)), set(re.findall(r"`(tests/[\w/.]+)`", page))
    assert len(named) > 40
    assert named <= defined
    assert [file for file in files if not (ROOT / file).exists()] == []


HOLE = re.compile(r"^\|.*\n\n(?=\|.*\n(?!\|[ :|-]+$))|^(?:- |  ).*\n\n(?=- )", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_and_lists_are_whole(page: Path) -> None:
    """No empty line splits a table or a list of a page.

    Regression: rows of four tables were shown as text, after an empty line.
    """
    assert HOLE.findall(prose(page)) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`: three\n[a](#one-two-three) [b](#four) [c](gone.md) [d](https://example.org/#e)\n")
    assert broken_links(page) == ["#four", "gone.md"]
