"""Which targets there are: leases, held by one named actor. Whoever wants the list waits for the next one.

`Leases` knows no Ray. The actor may die: it begins empty, and targets renew their leases within a beat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

BEAT_S = 1.0
"""Between two renewals."""
LEASE_S = 3.0
"""For which a target is believed to be there."""
ANSWER_S = 10.0
"""A wait ends so, if nothing has changed: whoever has died waits no longer."""
NAME = NAMESPACE = "specdec"
NUM_CALLS = 1000


@dataclass(frozen=True, slots=True)
class Lease:
    """A target.

    Attributes:
        address: HOST:PORT.
        node: id of the Ray node that it is on.
        until: when it is gone, unless the lease is renewed.
    """

    address: str
    node: str
    until: float


class Leases:
    """Targets by key. Used from one event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._whole_at = clock() + 1.5 * BEAT_S  # before, some that there are may not have been heard of yet
        self._leases: dict[str, Lease] = {}
        self._version = time.time_ns() // 1_000_000  # grows, also from one actor to the next
        self._changed = asyncio.Event()

    async def put(self, key: str, address: str, node: str) -> None:
        """A target is there, and will be for a while."""
        before = self._leases.get(key)
        self._leases[key] = Lease(address, node, self._clock() + LEASE_S)
        if before is None or before.address != address:
            self._tell()

    async def remove(self, key: str) -> None:
        """A target takes no new sessions; those that it has are its own affair."""
        if self._leases.pop(key, None) is not None:
            self._tell()

    async def leases(self) -> dict[str, Lease]:
        """Those that are good now."""
        self._expire()
        return dict(self._leases)

    async def wait(self, known: int) -> tuple[int, list[str]]:
        """Version and addresses, once they are others than those of version `known`, or after a while as they are."""
        ends_at = self._clock() + ANSWER_S
        while True:
            self._expire()
            is_news = self._version != known and self._clock() >= self._whole_at
            if is_news or self._clock() >= ends_at:
                return self._version, [lease.address for lease in self._leases.values()]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=BEAT_S / 2)

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, lease in self._leases.items() if lease.until < now]:
            del self._leases[key]
            self._tell()

    def _tell(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def registry() -> Any:
    """A handle of the actor, which is made if it is not there: on the head, since that outlives the other nodes."""
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
