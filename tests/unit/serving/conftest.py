"""Fixture by which loaded objects stay frozen after a host's end: the next host would search them for garbage."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows whenever a host would give all objects back to the garbage collector."""
    calls: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append(True))
    return calls
