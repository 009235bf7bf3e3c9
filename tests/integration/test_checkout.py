"""Tests of checkouts without symbolic links, as Git for Windows makes them, or programs that unpack a zip file."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.inference.config import ROOT

pytestmark = [pytest.mark.long, pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's copy")]
ROOM = "tests/unit/observe"


def cloned(home: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", "--config", "core.symlinks=false", ROOT, home / "clone"], check=True)
    return home / "clone"


def unpacked(home: Path) -> Path:
    subprocess.run(["git", "archive", "--format=zip", f"--output={home}/specdec.zip", "HEAD"], cwd=ROOT, check=True)
    with zipfile.ZipFile(home / "specdec.zip") as archive:
        archive.extractall(home / "unpacked")
    return home / "unpacked"


@pytest.mark.parametrize("made", [cloned, pytest.param(unpacked, marks=pytest.mark.release)])
def test_a_checkout_without_links_runs(made: Callable[[Path], Path], tmp_path: Path) -> None:
    """If the links in the root folder are small text files, a command and one folder's unit tests still work.

    Regression: the packages were links inside `specdec`, so every command ended in ModuleNotFoundError.
    """
    checkout = made(tmp_path)
    assert (checkout / "inference").read_text().strip() == "specdec/inference", "it has a text in place of the link"
    role = ["main.py", "--role", "verify_draft", "--prompt", "1, 2, 3,", "--max_new_tokens", "4"]
    for command in (role, ["-m", "pytest", "-q", "-p", "no:cacheprovider", ROOM]):
        done = subprocess.run(
            [sys.executable, *command], cwd=checkout, capture_output=True, text=True, env=dict(os.environ), check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
