"""Registry of targets: one named Ray actor that holds their leases.

Followers (draft workers and gateways) wait for the next version of the list of targets. `Leases` does not use Ray. The
actor may die: it restarts empty, and targets renew their leases within `BEAT_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

BEAT_S = 1.0
"""Seconds between two renewals."""
LEASE_S = 3.0
"""Seconds that a lease is good without a renewal."""
RENEWALS_S = 1.5 * BEAT_S
"""Seconds in which each target that is alive renews its lease."""
ANSWER_S = 10.0
"""Longest wait for a change, in seconds; it ends the calls of followers that have died."""
NAME = NAMESPACE = "specdec"
NUM_CALLS = 1000


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease of a target.

    Attributes:
        address: the target's HOST:PORT.
        node: id of the target's Ray node.
        until: time at which it expires, unless it is renewed.
    """

    address: str
    node: str
    until: float


class Leases:
    """Leases of targets by key. Used from one event loop only.

    A new registry, or one whose process hung, does not know all targets: followers get no list before each target has
    had the time to renew its lease.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._whole_at = clock() + RENEWALS_S
        self._leases: dict[str, Lease] = {}
        self._version = time.time_ns() // 1_000_000  # grows, also from one actor to the next
        self._changed = asyncio.Event()

    async def put(self, key: str, address: str, node: str) -> None:
        """Grant or renew a target's lease."""
        before = self._leases.get(key)
        self._leases[key] = Lease(address, node, self._clock() + LEASE_S)
        if before is None or before.address != address:
            self._tell()

    async def remove(self, key: str) -> None:
        """End a target's lease: the target gets no new sessions, and serves its present ones."""
        if self._leases.pop(key, None) is not None:
            self._tell()

    async def leases(self) -> dict[str, Lease]:
        """Return the leases that have not expired, by key."""
        self._expire()
        return dict(self._leases)

    async def wait(self, known: int) -> tuple[int, list[str]]:
        """Return version and addresses when they differ from version `known`, or unchanged after `ANSWER_S`."""
        ends_at = self._clock() + ANSWER_S
        while True:
            self._expire()
            now = self._clock()
            if now >= self._whole_at and (self._version != known or now >= ends_at):
                return self._version, [lease.address for lease in self._leases.values()]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=BEAT_S / 2)

    def _expire(self) -> None:
        now = self._clock()
        if now - self._looked_at > LEASE_S - BEAT_S:  # renewals may wait to be read
            self._whole_at = now + RENEWALS_S
        self._looked_at = now
        for key in [key for key, lease in self._leases.items() if lease.until < now]:
            del self._leases[key]
            self._tell()

    def _tell(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def registry() -> Any:
    """Return a handle of the actor; create it if it is missing, on the head, which outlives the other nodes."""
    import ray

    actor = ray.remote(Leases).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=NUM_CALLS,
    )
    return actor.remote()
