"""docs/deployment.md: what it tells to type is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inference.config import ROOT
from tests.deploy.kustomize import KUSTOMIZATIONS, OVERLAYS
from tests.test_tutorials import check_role, command_lines

pytestmark = pytest.mark.deploy

PAGE = ROOT / "docs" / "deployment.md"
TEXT = PAGE.read_text(encoding="utf-8")
FOREIGN = {
    "docker",
    "cd",
    "cp",
    "curl",
    "sudo",
    "aws",
    "make",
    "kind",
    "kubectl",
    "eksctl",
    "helm",
    "pip",
    "env",
    "serve",
    "umask",
    ".",
}


@pytest.fixture
def lines(tmp_path: Path) -> list[list[str]]:
    """Its command lines; blocks within lists are indented, which command_lines does not know."""
    copy = tmp_path / PAGE.name
    copy.write_text(re.sub(r"^   ", "", TEXT, flags=re.MULTILINE))
    return command_lines(copy)


def test_what_is_applied_is_there(lines: list[list[str]]) -> None:
    folders = [words[3] for words in lines if words[:3] == ["kubectl", "apply", "-k"]]
    applied = {folder.removeprefix("deploy/kubernetes/") for folder in folders}
    assert applied <= set(KUSTOMIZATIONS)
    assert len(applied) >= 8
    assert all(f"`{name}`" in TEXT for name in OVERLAYS)


def test_every_program_and_file_is_known(lines: list[list[str]]) -> None:
    for words in lines:
        assert words[0] in FOREIGN or (ROOT / words[0]).is_file(), words
    named = set(re.findall(r"(?<![\w/])(?:tests/)?deploy/[\w./-]*\w", TEXT))
    assert [each for each in sorted(named) if not (ROOT / each).exists()] == []
    goals = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {words[1] for words in lines if words[0] == "make"} <= goals


def test_the_line_for_an_instance_is_taken(lines: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ran = [words for words in lines if words[:2] == ["docker", "run"]]
    for words in ran:
        check_role(words[words.index("--role") :])
    assert len(ran) == 1


def test_every_alert_has_its_advice() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert [each for each in alerts if each not in TEXT] == []
