"""Tests that the commands, files and overlays named on the pages about deployment exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec.inference.cli.roles.registry import ROLES
from specdec.inference.config import ROOT
from tests.deploy.consistency import arguments_of, variables_of
from tests.deploy.kustomize import KUBERNETES, KUSTOMIZATIONS, OVERLAYS, manifests, of_kind
from tests.test_tutorials import check_role, command_lines

pytestmark = pytest.mark.deploy

TEXT = "".join(
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("deployment", "kubernetes", "eks")
)
FOREIGN = {
    *(".", "docker", "cd", "cp", "curl", "sudo", "aws", "make", "kind", "kubectl", "eksctl", "helm", "pip"),
    *("env", "serve", "set", "export", "umask"),
}


@pytest.fixture
def lines(tmp_path: Path) -> list[list[str]]:
    """Return the command lines in the code blocks of the deployment pages, each split into words."""
    copy = tmp_path / "page.md"
    copy.write_text(re.sub(r"^ {3,4}(?! )", "", TEXT, flags=re.MULTILINE))
    return command_lines(copy)


def test_applied_files_exist(lines: list[list[str]]) -> None:
    folders = [words[3] for words in lines if words[:3] == ["kubectl", "apply", "-k"]]
    applied = {folder.removeprefix("deploy/kubernetes/") for folder in folders}
    assert applied <= set(KUSTOMIZATIONS)
    assert len(applied) >= 8
    assert all(f"`{name}`" in TEXT for name in OVERLAYS)


def test_every_program_and_file_is_known(lines: list[list[str]]) -> None:
    for words in lines:
        program = next((word for word in words if not re.match(r"\w+=", word)), words[0])  # after what it sets
        is_ours = program == "specdec" and words[words.index(program) + 1] in ROLES
        assert is_ours or program in FOREIGN or (ROOT / program).is_file(), words
    named = set(re.findall(r"(?<![\w/])(?:tests/)?deploy/[\w./-]*\w", TEXT))
    assert [each for each in sorted(named) if not (ROOT / each).exists()] == []
    goals = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {words[1] for words in lines if words[0] == "make"} <= goals


def flags_after_role(words: list[str]) -> dict[str, str]:
    words = words[words.index("--role") :]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_lines_for_an_instance_are_taken(lines: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' `docker run` commands parse; the one that compiles makes the model that the cluster's servers use."""
    monkeypatch.chdir(ROOT)
    ran = [words for words in lines if words[:2] == ["docker", "run"]]
    for words in ran:
        check_role(words[words.index("--role") :])
    [compiling] = [words for words in ran if "--compile" in words]
    documents = manifests(KUBERNETES / "overlays" / "trn2-fused")
    [server] = of_kind(documents, "StatefulSet")
    served, compiled = arguments_of(server, documents), flags_after_role(compiling)
    assert compiled.pop("--compile") == "only"
    assert compiled.pop("--compiled_model_path") == variables_of(server, documents)["NEURON_COMPILED_ARTIFACTS"]
    assert compiled.items() <= served.items()
    assert all(f"--{name}" in compiled for name in ("config", "target_model", "draft_model"))
    platform = variables_of(server, documents)["NEURON_PLATFORM_TARGET_OVERRIDE"]
    assert f"NEURON_PLATFORM_TARGET_OVERRIDE={platform}" in compiling


def test_every_alert_has_its_advice() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert [each for each in alerts if each not in TEXT] == []
