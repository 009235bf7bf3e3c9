"""Choice of the server for each request, among several servers of one model, the replicas.

The least loaded replica that is ready gets the request. A replica that fails three times in a row is ejected, that is,
gets no requests for a while, longer each time. This module knows addresses and counts, but no sockets and no clock.

gRPC's own policies do not suffice. C-core has no least_request, and no ejection without xDS. A `round_robin` channel
neither reports which server answered nor leaves one out for a single request; ring_hash ignores load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_FAILURES = 3
"""Failures in a row after which a replica is ejected."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""First and longest pause of an ejected replica, in seconds; each ejection doubles the pause."""
FORGIVEN_AFTER_S = 60.0
"""Seconds from the end of the latest pause, after which a success lets the replica's next pause be a first one."""
NEAR = 1
"""Number of requests by which the replica preferred for a prompt's beginning, which it may have cached, may exceed the
least loaded one."""


@dataclass(slots=True)
class Record:
    """State of one replica.

    Attributes:
        ready: True if the replica reports that it accepts requests.
        num_outstanding: requests that this process sent to the replica and that still run.
        num_failures: failures in a row.
        num_ejections: ejections since the replica last recovered; each pauses it for longer.
        back_at: time at which the pause of the latest ejection ends, in seconds.
        chosen_at: ordinal number of the latest choice that took this replica.
    """

    ready: bool = False
    num_outstanding: int = 0
    num_failures: int = 0
    num_ejections: int = 0
    back_at: float = 0.0
    chosen_at: int = 0


class Replicas:
    """Records of replicas by address, and the choice among them. All times must be seconds of the same clock."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self._num_choices = 0

    def keep(self, addresses: Sequence[str]) -> None:
        """Replace the set of replicas; the records of replicas that stay are kept."""
        self.records = {address: self.records.get(address, Record()) for address in addresses}

    def set_ready(self, address: str, *, ready: bool) -> bool:
        """Record whether a replica accepts requests; return False if there is no such replica.

        If the replica accepts them again after its first ejection, its pause ends at once. After further ejections it
        does not: a connection that breaks again and again would end the pause each time.
        """
        record = self.records.get(address)
        if record is None:
            return False
        if ready and not record.ready and record.num_ejections <= 1:
            record.back_at = 0.0
        record.ready = ready
        return True

    def choose(
        self, now: float, *, prefix: str = "", failed: Collection[str] = (), unfit: Collection[str] = ()
    ) -> str | None:
        """Return the address of the replica for a request, which counts as sent; None if all replicas are unfit.

        While no replica is ready, one that is not is chosen: only a request shows whether it serves again.

        Args:
            now: the present time, in seconds.
            prefix: hash of the prompt's beginning; requests with equal hashes get the same replica while loads are
                similar. Empty: the load alone decides.
            failed: addresses at which the request has just failed, to be tried last.
            unfit: addresses that must not get the request.
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
        """Return whether any replica whose address is not in `than` is ready and not paused."""
        return any(
            record.ready and record.back_at <= now and address not in than for address, record in self.records.items()
        )

    def ended(self, address: str, now: float, *, failed: bool | None) -> None:
        """Record that a request has ended at a replica.

        Args:
            address: address of the replica.
            now: the present time, in seconds.
            failed: True after a fault of the replica, False after a success, None after neither.
        """
        record = self.records.get(address)
        if record is None:  # the replica was removed meanwhile
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
        if record.num_failures >= MAX_FAILURES and record.back_at <= now:  # later failures began before the pause
            record.back_at = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**record.num_ejections)
            record.num_ejections += 1
            record.num_failures = 0

    def _least(self, addresses: Sequence[str]) -> str:
        """Return the address with the fewest requests; of equal ones, the address that was chosen longest ago."""
        return min(addresses, key=lambda each: (self.records[each].num_outstanding, self.records[each].chosen_at))

    def _nearest(self, addresses: Sequence[str], prefix: str) -> str:
        """Return the first address with nearly the fewest requests, in an order that `prefix` alone decides."""
        limit = min(self.records[address].num_outstanding for address in addresses) + NEAR
        near = [address for address in addresses if self.records[address].num_outstanding <= limit]
        return max(near, key=lambda address: hashlib.sha256(f"{prefix} {address}".encode()).digest())
