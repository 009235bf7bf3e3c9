"""The shell scripts of deploy/kubernetes, with programs in place of kubectl and hf that write down what is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.caller import Right
from inference.workers.auth_file import read_auth_file
from tests.deploy.kustomize import KUBERNETES

pytestmark = pytest.mark.deploy

KUBECTL = """#!/bin/sh
case "$*" in
    *"create secret"*)
        while [ "$1" != --from-file ]; do shift; done
        cp "$2"/* "$KEPT" ;;
    *) cat > /dev/null ;;
esac
"""
HF = """#!/bin/sh
mkdir -p "$4/.cache" "$4/original"
for file in a.safetensors config.json original/params.json; do echo "$2 $file" > "$4/$file"; done
"""


def stand_in(folder: Path, name: str, script: str) -> dict[str, str]:
    """An environment whose PATH has `script` under that name."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(script)
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHON": sys.executable}


def test_tokens_are_made_and_targets_know_their_hashes(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    environment = stand_in(tmp_path, "kubectl", KUBECTL) | {"KEPT": str(kept)}
    subprocess.run([KUBERNETES / "access.sh", "cpu-demo"], check=True, env=environment, stdin=subprocess.DEVNULL)
    known = read_auth_file(kept / "auth.toml")
    for name, right in (("worker", Right.WORKER), ("gateway", Right.CLIENT), ("ops", Right.OPS)):
        owner = known.of_token((kept / name).read_text().strip())
        assert owner is not None
        assert (owner.name, set(owner.rights)) == (name, {right})
        assert owner.speaks_for_others == (name == "gateway")


def fetch(folder: Path) -> str:
    environment = stand_in(folder, "hf", HF) | {"MODEL_IDS": "Qwen/A Qwen/B", "SCRATCH": str(folder / "scratch")}
    script = [KUBERNETES / "weights" / "fetch.sh", folder / "models"]
    return subprocess.run(["sh", *script], check=True, env=environment, capture_output=True, text=True).stdout


def test_weights_are_fetched_once_and_config_comes_last(tmp_path: Path) -> None:
    """A run that was killed before config.json goes on with what is missing; no file is written twice."""
    (tmp_path / "models").mkdir()
    fetch(tmp_path)
    files = {path.relative_to(tmp_path / "models").as_posix() for path in (tmp_path / "models").rglob("*.*")}
    assert files == {
        f"{name}/{file}" for name in "AB" for file in ("a.safetensors", "config.json", "original/params.json")
    }
    weights = tmp_path / "models" / "A" / "a.safetensors"
    (tmp_path / "models" / "A" / "config.json").unlink()
    weights.chmod(0o444)
    os.utime(weights, (1, 1))
    assert "models/B is there" in fetch(tmp_path)
    assert weights.stat().st_mtime == 1
    assert (tmp_path / "models" / "A" / "config.json").read_text() == "Qwen/A config.json\n"
