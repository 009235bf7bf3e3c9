"""CloudWatch's stand-in, which takes seconds to start: one for all tests, and each test finds it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.cloudwatch import CloudWatch, moto


@pytest.fixture(scope="session")
def _moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudWatch]:
    with moto(tmp_path_factory.mktemp("moto")) as service:
        yield service


@pytest.fixture
def cloudwatch(_moto: CloudWatch) -> CloudWatch:
    _moto.empty()
    return _moto
