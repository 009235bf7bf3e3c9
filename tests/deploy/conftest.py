"""Fixtures that several tests of deploy/ share: the demo's access tokens, and moto as a stand-in for AWS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.cloudwatch import CloudWatch, moto
from tests.deploy.kustomize import KUBERNETES
from tests.deploy.stand_ins import KUBECTL, stand_in


@pytest.fixture
def access(tmp_path: Path) -> Path:
    """Run access.sh, which makes the demo's access tokens; return a folder with the files that it puts in a Secret."""
    (kept := tmp_path / "kept").mkdir()
    environment = stand_in(tmp_path, "kubectl", KUBECTL) | {"KEPT": str(kept)}
    subprocess.run([KUBERNETES / "access.sh", "cpu-demo"], check=True, env=environment, stdin=subprocess.DEVNULL)
    return kept


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudWatch]:
    with moto(tmp_path_factory.mktemp("moto")) as service:
        yield service


@pytest.fixture
def cloudwatch(moto_server: CloudWatch) -> CloudWatch:
    """Return the stand-in for AWS, emptied of all that earlier tests created."""
    moto_server.reset()
    return moto_server
