"""Policy for the number of targets. Serve's controller runs it ten times a second: no input, no output, no Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

FULL = 0.8
"""Share of slots in use above which there should be one more target."""


class Context(Protocol):
    """Context that Serve passes to a policy: the mean by replica of each metric that replicas report."""

    @property
    def current_num_replicas(self) -> int: ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...

    @property
    def policy_state(self) -> Mapping[str, Any] | None: ...


def by_slots(context: Context) -> tuple[int, dict[str, Any]]:
    """Return the number of targets at which all sessions, running or waiting, fill the share `FULL` of the slots.

    Serve keeps the number within the limits of the deployment.
    """
    metrics, state = context.aggregated_metrics or {}, dict(context.policy_state or {})
    busy, slots = metrics.get("busy", {}), metrics.get("slots", {})
    if not busy or not sum(slots.values()):  # no replica has reported yet
        return context.current_num_replicas, state
    slots_of_one = sum(slots.values()) / len(slots)
    return max(1, math.ceil(sum(busy.values()) / (FULL * slots_of_one))), state
