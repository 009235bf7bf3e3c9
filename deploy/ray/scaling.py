"""How many targets there should be. Runs inside Serve's controller, ten times a second: no input, no output, no Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

FULL = 0.8
"""Share of the slots that may be in use before there should be one target more."""


class Context(Protocol):
    """What Serve tells a policy: of each metric that replicas report, the mean by replica."""

    @property
    def current_num_replicas(self) -> int: ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...

    @property
    def policy_state(self) -> Mapping[str, Any] | None: ...


def by_slots(context: Context) -> tuple[int, dict[str, Any]]:
    """So many targets that the sessions that run or wait take `FULL` of their slots; Serve keeps it in its limits."""
    metrics, state = context.aggregated_metrics or {}, dict(context.policy_state or {})
    busy, slots = metrics.get("busy", {}), metrics.get("slots", {})
    if not busy or not sum(slots.values()):  # nobody has reported yet
        return context.current_num_replicas, state
    slots_of_one = sum(slots.values()) / len(slots)
    return max(1, math.ceil(sum(busy.values()) / (FULL * slots_of_one))), state
