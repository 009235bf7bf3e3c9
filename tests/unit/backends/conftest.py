"""Fixtures of backends: one thread for tiny models, and a folder of the run's own for caches.

Several threads would only wait for each other on a busy machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep packed weights of the onnx backend out of the developer's cache."""
    pytest.importorskip("torch", exc_type=ModuleNotFoundError).set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def same_number_of_threads() -> Iterator[None]:
    """Restore the number of threads, which loading sets for the whole process."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
