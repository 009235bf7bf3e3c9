"""Which of several servers of one model a request is sent to.

The least loaded of those that are ready; one that failed three times in a row has a pause, a longer one each time.
Knows addresses and counts, no sockets and no clock.

Not gRPC's own policies: C-core has no least_request, and no ejection without xDS; a `round_robin` channel neither says
who answered nor leaves out a server for one request's sake; its ring_hash looks at no load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_FAILURES = 3
"""In a row, and a replica is ejected."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""For which an ejected replica gets no request; doubles with each ejection."""
FORGIVEN_AFTER_S = 60.0
"""An ejection so long past counts no more, once the replica has done well again."""
NEAR = 1
"""Requests that the replica which knows a prefix may have above the least loaded one."""


@dataclass(slots=True)
class Record:
    """What is known of one replica.

    Attributes:
        ready: it says that requests are welcome.
        num_outstanding: requests sent from here that still run.
        num_failures: in a row.
        num_ejections: that are not forgiven.
        back_at: when the latest ejection ends.
        chosen_at: number of the latest choice that fell on it.
    """

    ready: bool = False
    num_outstanding: int = 0
    num_failures: int = 0
    num_ejections: int = 0
    back_at: float = 0.0
    chosen_at: int = 0


class Replicas:
    """Records of replicas by address, and the choice among them. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self._num_choices = 0

    def keep(self, addresses: Sequence[str]) -> None:
        """There are these and no others; what is known of those that stay is kept."""
        self.records = {address: self.records.get(address, Record()) for address in addresses}

    def told(self, address: str, *, ready: bool) -> bool:
        """A replica says whether requests are welcome; one that comes back is another one, and begins anew.

        Returns:
            Whether there is such a replica.
        """
        record = self.records.get(address)
        if record is None:
            return False
        if ready and not record.ready:
            record.num_failures, record.back_at = 0, 0.0
        record.ready = ready
        return True

    def choose(
        self, now: float, *, prefix: str = "", failed: Collection[str] = (), unfit: Collection[str] = ()
    ) -> str | None:
        """The replica for a request, which counts as sent; None if there is none that is fit.

        While none is ready, it is one that is not: only a request finds out.

        Args:
            prefix: of the prompt: the same replica for equal ones, while loads are near; empty: none has it.
            failed: where the request has failed just now, to be tried last.
            unfit: which must not have it.
        """
        fit = {address: record for address, record in self.records.items() if address not in unfit}
        if not fit:
            return None
        worst = {address: (not each.ready, each.back_at > now, address in failed) for address, each in fit.items()}
        best = [address for address in fit if worst[address] == min(worst.values())]
        chosen = self._nearest(best, prefix) if prefix else self._least(best)
        record = self.records[chosen]
        self._num_choices += 1
        record.chosen_at = self._num_choices
        record.num_outstanding += 1
        return chosen

    def has_other(self, now: float, *, than: Collection[str]) -> bool:
        """Whether a request could go elsewhere at once."""
        return any(
            record.ready and record.back_at <= now and address not in than for address, record in self.records.items()
        )

    def ended(self, address: str, now: float, *, failed: bool | None) -> None:
        """A request has ended: whether by a fault of the replica; None: it says nothing of it."""
        record = self.records.get(address)
        if record is None:  # it has left meanwhile
            return
        record.num_outstanding = max(0, record.num_outstanding - 1)
        if failed:
            self._failed(record, now)
        elif failed is not None:
            record.num_failures = 0
            if now - record.back_at > FORGIVEN_AFTER_S:
                record.num_ejections = 0

    def _failed(self, record: Record, now: float) -> None:
        record.num_failures += 1
        if record.num_failures >= MAX_FAILURES and record.back_at <= now:  # what failed during its pause began before
            record.back_at = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**record.num_ejections)
            record.num_ejections += 1
            record.num_failures = 0

    def _least(self, addresses: Sequence[str]) -> str:
        """The least loaded; of several, the one that was chosen longest ago."""
        return min(addresses, key=lambda each: (self.records[each].num_outstanding, self.records[each].chosen_at))

    def _nearest(self, addresses: Sequence[str], prefix: str) -> str:
        """The first in the prefix's own order, which every caller has, whose load is near the least one."""
        limit = min(self.records[address].num_outstanding for address in addresses) + NEAR
        near = [address for address in addresses if self.records[address].num_outstanding <= limit]
        return max(near, key=lambda address: hashlib.sha256(f"{prefix} {address}".encode()).digest())
