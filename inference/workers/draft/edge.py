"""Private draft worker of a process that sends requests: it drafts for them, and for no others."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from inference.commit import Commit, Event
from inference.engine.draft import DraftEngine
from inference.errors import SpecDecError
from inference.observe.metrics import Metrics
from inference.scheduling.link import Link
from inference.workers.completion import CompletionRequest
from inference.workers.draft.pool_worker import Offer, PoolStream
from inference.workers.fleet import Fleet, Replica
from inference.workers.local import LocalCompleter
from inference.workers.remote import RemoteCompleter


class PrivateWorker:
    """Draft worker on the channels of a fleet."""

    def __init__(self, engine: DraftEngine, fleet: Fleet, offer: Offer, local: LocalCompleter) -> None:
        self._engine = engine
        self._offer = offer
        self._local = local
        self._metrics = Metrics("private", role="draft")
        self._streams: dict[Replica, PoolStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        for replica in fleet.replicas:
            self._stream(replica)

    def _stream(self, replica: Replica) -> PoolStream:
        if replica not in self._streams:
            stream = PoolStream(self._engine, replica.address, self._offer, self._metrics, is_private=True)
            self._streams[replica] = stream
            self._tasks.add(asyncio.create_task(stream.run(replica.channel)))
        return self._streams[replica]

    async def complete(
        self, at: RemoteCompleter, replica: Replica, request: CompletionRequest
    ) -> AsyncGenerator[Event, None]:
        stream = self._stream(replica)
        name, session = b"", None
        if stream.is_attached and request.gamma != 0:
            name = secrets.token_bytes(16)
            if request.seed is None:
                request = replace(request, seed=secrets.randbits(64))
            generation = await self._local.generation(request)
            stream._link = Link(stream._link)
            try:
                session = stream.begin(name.hex(), generation, stream._link)
            except SpecDecError:
                name = b""
        try:
            async with aclosing(at.complete(replace(request, draft_session=name))) as events:
                async for event in events:
                    if session is not None and isinstance(event, Commit):
                        session.commit(event)
                    yield event
        finally:
            if session is not None:
                stream._close(name.hex())
