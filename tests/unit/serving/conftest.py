"""Fixture for tests of hosts: loaded objects stay out of the garbage collector's searches after a host's end.

The next host would search all of them.
"""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Keep loaded objects frozen; return a list that grows whenever a host would give them back to the collector."""
    calls: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append(True))
    return calls
