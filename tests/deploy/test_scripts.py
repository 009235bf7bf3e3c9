"""Tests of the shell scripts in deploy/kubernetes; other scripts replace kubectl and hf, and record their arguments."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.inference.caller import Right
from specdec.inference.workers.calls.auth_file import read_auth_file
from tests.deploy.kustomize import KUBERNETES
from tests.deploy.stand_ins import KUBECTL, stand_in

pytestmark = pytest.mark.deploy

HF = """#!/bin/sh
mkdir -p "$4/.cache" "$4/original"
for file in a.safetensors config.json original/params.json; do echo "$2 $file" > "$4/$file"; done
"""


RIGHTS = {
    "worker": Right.WORKER,
    "gateway": Right.CLIENT,
    "ops": Right.OPS,
    "client": Right.CLIENT,
    "alice": Right.CLIENT,
}


def test_tokens_are_made_and_targets_know_their_hashes(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    environment = stand_in(tmp_path, "kubectl", KUBECTL) | {"KEPT": str(kept)}
    names = ["trn2-baseline", "trn2-fused", "benchmark"]
    environment["ACCOUNTS"] = "alice"
    subprocess.run([KUBERNETES / "access.sh", *names], check=True, env=environment, stdin=subprocess.DEVNULL)
    asked = (tmp_path / "asked").read_text()
    assert [name for name in names if f"--namespace specdec-{name} " in asked] == names
    known = read_auth_file(kept / "auth.toml")
    for name, right in RIGHTS.items():
        owner = known.of_token((kept / name).read_text().strip())
        assert owner is not None
        assert (owner.name, set(owner.rights)) == (name, {right})
        assert owner.speaks_for_others == (name == "gateway")


def policy_check(*addresses: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ADDRESSES": " ".join(addresses), "TIMEOUT_S": "1"}
    command = [sys.executable, str(KUBERNETES / "policy-check" / "check.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_policy_check_succeeds_only_where_every_attempt_is_dropped() -> None:
    """The script that checks network policies succeeds only if every attempt to connect gets no answer.

    A full accept queue stands for such a policy, since the kernel drops further attempts.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        silent = f"127.0.0.1:{full.getsockname()[1]}"
        while (done := policy_check(silent)).returncode != 0:  # it waits in the queue, and fills it
            assert "a stranger is let in" in done.stdout
        assert done.stdout == f"{silent}: dropped\n"
        with socket.create_server(("127.0.0.1", 0)) as server:
            open_to_all = f"127.0.0.1:{server.getsockname()[1]}"
            assert "a stranger is let in" in policy_check(silent, open_to_all).stdout
        assert "the pod refuses" in policy_check(open_to_all).stdout
        assert policy_check(silent, open_to_all).returncode == 1
        absent = policy_check("targets.absent.invalid:50051")
        assert (absent.returncode, "nothing was tried" in absent.stdout) == (1, True)


def fetch(folder: Path) -> str:
    environment = stand_in(folder, "hf", HF) | {"MODEL_IDS": "Qwen/A Qwen/B", "SCRATCH": str(folder / "scratch")}
    script = [KUBERNETES / "weights" / "fetch.sh", folder / "models"]
    return subprocess.run(["sh", *script], check=True, env=environment, capture_output=True, text=True).stdout


def test_weights_are_fetched_once_and_config_comes_last(tmp_path: Path) -> None:
    """After a download that was killed before it wrote config.json, the next one fetches only the missing files.

    No file is written twice, and config.json, which shows that a model is complete, comes last.
    """
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
