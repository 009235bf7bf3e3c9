"""Draft worker that attaches to targets, and drafts for those of their requests that they assign to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.names import Addresses, addresses_of
from specdec.grpc_comm.options import WORKER_OPTIONS
from specdec.inference.config import DialSecurity
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.observe.metrics import Metrics
from specdec.inference.workers.calls.dialling import credentials_of, named
from specdec.inference.workers.calls.status import calls_to
from specdec.inference.workers.drafting.stream import AssistStream, Offer

logger = logging.getLogger(__name__)


class DraftWork:
    """Base class of draft workers that reports to the process's host whether the draft engine works.

    It has the properties of the interface `Work` (inference/serving/host.py).
    """

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine

    @property
    def fault(self) -> str | None:
        """Return why no drafts are served at the moment; None if they are."""
        return self._engine.fault

    @property
    def hangs(self) -> bool:
        """Return whether `fault` is due to a thread of the engine that may never end."""
        return self._engine.hangs

    @property
    def broken(self) -> str | None:
        """Return why this process can never draft again; None if the engine is not broken."""
        return self._engine.broken


class PoolWorker(DraftWork):
    """Draft worker of several targets, each of which gets an equal share of the draft engine's slots.

    It begins to dial as soon as it is made, inside a running event loop.

    Args:
        engine: engine of the draft model.
        targets: HOST:PORT, dns:///NAME:PORT for all targets of a name, or file:///PATH for the targets of a list.
        offer: what the worker offers to all targets together.
        metrics: metrics in which the sessions are counted.
    """

    def __init__(self, engine: DraftEngine, targets: Sequence[str], offer: Offer, metrics: Metrics) -> None:
        super().__init__(engine)
        self._offer = offer
        self._metrics = metrics
        self._streams: dict[str, tuple[AssistStream, asyncio.Task[None]]] = {}
        self._task = asyncio.create_task(self._serve(targets))

    @property
    def fault(self) -> str | None:
        """Return why no drafts are made now, such as that no target uses this worker; None if they are made."""
        is_attached = any(stream.is_attached for stream, _ in self._streams.values())
        return super().fault or (None if is_attached else "no target has this worker in its pool")

    @property
    def vocabulary_share(self) -> float:
        """Return the share (0 to 1) of a target's token ids that the draft can propose: the least over all targets."""
        return min((stream.vocabulary.share_of(stream.vocab_size) for stream, _ in self._streams.values()), default=1.0)

    async def refused(self) -> None:
        """Wait until every target has refused this worker, and then raise the last refusal; never return normally.

        Raises:
            RequestError: a target refused the worker.
            HandshakeError: a target cannot be trusted.
        """
        await asyncio.shield(self._task)

    async def stop(self, *, grace_s: float) -> None:
        """Leave the targets at once; `grace_s` is ignored, since requests go on there without drafts."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self, targets: Sequence[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                with calls_to(", ".join(targets)):
                    async for addresses in addresses_of(targets):
                        self._take(addresses, group)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the first failure cancels the other streams

    def _take(self, addresses: Addresses, group: asyncio.TaskGroup) -> None:
        """Draft from now on only for the targets at `addresses`, each with an equal share of the slots.

        The streams to new targets run as tasks of `group`; those to targets that are no longer named are cancelled.

        Args:
            addresses: table from HOST:PORT to the DNS name that led to it; None for one that was given as HOST:PORT.
        """
        for address in self._streams.keys() - addresses.keys():
            self._streams.pop(address)[1].cancel()
        share = max(1, self._offer.num_slots // max(1, len(addresses)))
        for stream, _ in self._streams.values():
            stream.resize(share)
        for address in addresses.keys() - self._streams.keys():
            security = named(self._offer.security, addresses[address])
            offer = replace(self._offer, num_slots=share, security=security)
            stream = AssistStream(self._engine, address, offer, self._metrics)
            self._streams[address] = stream, group.create_task(self._run(stream, security))

    async def _run(self, stream: AssistStream, security: DialSecurity) -> None:
        """Draft for a target over its stream, without end.

        Raises:
            RequestError, HandshakeError: the target's refusal, once all targets have refused this worker.
        """
        await stream.serve(
            lambda: open_channel(stream.address, credentials_of(security), options=WORKER_OPTIONS),
            lambda: not all(each.is_refused for each, _ in self._streams.values()),
        )
