"""Private draft worker: it drafts for the requests that its own process sends to targets, on the same connections.

It begins to draft before a request has reached the target. The request carries a name, `draft_session`, by which the
target finds its draft tokens. The worker learns from the request's answer which tokens the target committed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from contextvars import Context
from dataclasses import replace

from specdec.inference.caller import caller
from specdec.inference.commit import Delta, TextEvent
from specdec.inference.config import DraftConfig
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.errors import CapacityError, InvalidRequestError, RequestError, UnavailableError
from specdec.inference.request import Schedule
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls.fleet import Fleet, Replica
from specdec.inference.workers.completing.reading import Reader
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import DRAFT_SESSION_BYTES, CompletionRequest
from specdec.inference.workers.drafting.session import DraftingSession
from specdec.inference.workers.drafting.stream import AssistStream, Offer

logger = logging.getLogger(__name__)

ATTACH_S = 2.0
"""Longest wait at the process's start, in seconds, for a target to accept this draft worker."""


class PrivateWorker:
    """Draft worker for the requests that its own process sends to targets, with an Assist stream to each target.

    It begins to attach as soon as it is made, inside a running event loop.

    Args:
        engine: engine of the draft model.
        fleet: targets; drafts and requests use the same channels.
        config: settings, with the schedule and gamma for requests that set none.
        vocabulary: vocabulary of the draft.

    Attributes:
        reader: reader that translates requests as the targets do; its owner replaces it when their model changes.
        num_undrafted: number of requests that asked for drafts, but for which no draft token reached the target.
    """

    def __init__(
        self, engine: DraftEngine, fleet: Fleet, config: DraftConfig, vocabulary: Vocabulary, reader: Reader
    ) -> None:
        self._engine = engine
        self._config = config
        self._vocabulary = vocabulary
        self.reader = reader
        self.num_undrafted = 0
        self._streams: dict[Replica, tuple[AssistStream, asyncio.Task[None]]] = {}
        for replica in fleet.replicas:
            self._stream(replica)
        self._following = asyncio.create_task(self._follow(fleet))

    async def until_attached(self) -> None:
        """Wait until a target has accepted this worker, but at most `ATTACH_S` seconds."""
        waiting = [asyncio.create_task(stream.attached.wait()) for stream, _ in self._streams.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=ATTACH_S, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    @property
    def vocabulary_share(self) -> float:
        """Return the share (0 to 1) of the target's token ids that the draft can propose."""
        return self._vocabulary.share_of(self.reader.vocab_size)

    async def stop(self) -> None:
        """End the streams to the targets; requests that run there go on without drafts."""
        tasks = [self._following, *(task for _, task in self._streams.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, fleet: Fleet) -> None:
        """Keep one stream to each server of the fleet, and dial lost ones anew when a server becomes ready."""
        async with aclosing(fleet.serves()) as changes:
            async for _ in changes:
                for replica in self._streams.keys() - set(fleet.replicas):
                    self._streams.pop(replica)[1].cancel()
                for replica in fleet.replicas:
                    self._stream(replica).dial_now()

    def _stream(self, replica: Replica) -> AssistStream:
        if replica not in self._streams:
            num_slots, threads = self._engine.num_slots, self._config.num_threads
            offer = Offer(self._vocabulary, self._config.gamma, num_slots, replica.security, num_threads=threads)
            stream = AssistStream(self._engine, replica.address, offer)
            serving = stream.serve(lambda: nullcontext(replica.channel))
            # Not in the context of the request that finds the target: every call of the stream would have its name.
            self._streams[replica] = stream, asyncio.create_task(serving, context=Context())
        return self._streams[replica][0]

    async def complete(
        self, remote: RemoteCompleter, replica: Replica, request: CompletionRequest
    ) -> AsyncGenerator[TextEvent, None]:
        """Yield the events of a target's answer to a request, and draft for the request meanwhile.

        Args:
            remote: completer that asks the target.
            replica: the target, to which the draft tokens are sent.
            request: request to answer. It goes on without drafts if the target has not accepted this worker.
        """
        stream, name = self._stream(replica), secrets.token_hex(DRAFT_SESSION_BYTES)
        schedule = request.schedule or self._config.schedule
        request = replace(
            request,
            gamma=self._config.gamma if request.gamma is None else request.gamma,
            schedule=stream.link.schedule if schedule is Schedule.LOAD else schedule,
            cache_salt=caller().cache_salt(request.cache_salt),  # the target may know this process alone
        )
        if stream.is_attached and request.gamma:
            request = replace(request, draft_session=name)
        elif request.gamma:
            self.num_undrafted += 1
        async with aclosing(remote.complete(request)) as events:
            first = asyncio.ensure_future(anext(events))
            try:
                await asyncio.sleep(0)  # the request leaves, and its prompt is read here meanwhile
                session = await self._begun(stream, request) if request.draft_session else None
                yield await first
                async for event in events:
                    if session is not None and isinstance(event, Delta):
                        try:
                            event = self._committed(stream, session, event)
                        except InvalidRequestError as exc:  # the target reads the prompt as other tokens
                            stream.decline(name, exc)
                            self.num_undrafted += not session.is_heard
                            session = None
                        event = replace(event, counts=replace(event.counts, bytes_down=remote.take_bytes()))
                    yield event
            finally:
                stream.close(name)  # before anything that another cancellation could interrupt
                first.cancel()
                await asyncio.wait([first])

    async def _begun(self, stream: AssistStream, request: CompletionRequest) -> DraftingSession | None:
        """Begin to draft for a request; return the session that drafts.

        If that fails, tell the target not to wait for draft tokens, and return None.
        """
        try:
            generation = await self.reader.read(request.resolved(self.reader.defaults))
            if request.resume is not None:
                generation = generation.resumed(request.resume.token_ids)
            return stream.begin(request.draft_session, generation, vocab_size=self.reader.vocab_size)
        except (CapacityError, RequestError, UnavailableError) as exc:
            stream.decline(request.draft_session, exc)
            return None

    def _committed(self, stream: AssistStream, session: DraftingSession, delta: Delta) -> Delta:
        """Tell the session that drafts for a request which tokens the target committed.

        Return `delta`, the event with these tokens, with the time and bytes that drafting took.

        Raises:
            InvalidRequestError: the tokens do not follow those that the session has.
        """
        delta = session.commit(delta)
        if delta.finish_reason is not None:
            self.num_undrafted += session.is_heard is False
            stream.judge(session)
        return delta
