"""Fixtures of all backends: a folder for caches that only this test run uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point the cache of packed weights to a folder of this test run, away from the developer's."""
    pytest.importorskip("torch", exc_type=ModuleNotFoundError)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
