"""Fixture for tests of hosts: after a host's end, loaded objects stay exempt from the garbage collector's searches.

Otherwise the next host, which exempts all objects at its start, would search them all again.
"""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Keep loaded objects exempt from garbage collection; return a list that grows when a host would undo that."""
    calls: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append(True))
    return calls
