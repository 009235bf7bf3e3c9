"""Draft worker of a pool: it dials targets, and drafts for the sessions that they assign to it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import grpc

from grpc_comm.channel import open_channel
from grpc_comm.names import Addresses, addresses_of
from grpc_comm.options import WORKER_OPTIONS
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.caller import ANYBODY, harmless_id, request_context
from inference.commit import Commit
from inference.config import PLAIN, DialSecurity
from inference.engine.draft import DraftEngine, TargetWords
from inference.engine.target import check_token_ids
from inference.errors import (
    CapacityError,
    HandshakeError,
    InvalidRequestError,
    RequestError,
    SpecDecError,
    UnavailableError,
)
from inference.observe.metrics import Metrics
from inference.request import GenerationRequest, Grammar
from inference.scheduling.link import Link
from inference.text.tokenizer import Tokenizer
from inference.text.vocabulary import Vocabulary, require_one_vocabulary
from inference.workers.convert import PROTOCOL_VERSION, commit_from_message, open_from_message
from inference.workers.dialling import check_link, credentials_of, named
from inference.workers.draft.proposals import ProposalSender
from inference.workers.draft.schedules import Runner
from inference.workers.status import calls_to

logger = logging.getLogger(__name__)

REDIAL_S = 1.0
"""Mean wait before a lost target is dialled again."""
REFUSED_S = 60.0
"""Mean wait before a target that refused the worker is dialled again."""
MAX_OUTBOX = 256
"""Limit of messages queued for a target. When it is reached, proposals wait for room and other messages are dropped."""

AssistCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.AssistRequest, pb.AssistResponse]"


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer of a worker to a target.

    Attributes:
        vocabulary: vocabulary in whose ids the engine drafts.
        gamma: most draft tokens of one pass, for sessions whose request sets no gamma.
        num_slots: most sessions at a time.
        security: credentials of the worker, and the authorities that it trusts.
        learn: makes drafts in the ids of another tokenizer possible, on a thread; None: such targets are refused.
    """

    vocabulary: Vocabulary
    gamma: int
    num_slots: int
    security: DialSecurity = PLAIN
    learn: Callable[[Tokenizer], TargetWords] | None = None


class PoolWorker:
    """Draft worker of several targets, each with an equal share of the slots. Start it inside a running event loop.

    Args:
        engine: draft engine.
        targets: HOST:PORT, dns:///NAME:PORT for all targets of a name, or file:///PATH for the targets of a list.
        offer: offer to all targets together; each gets a share of its slots.
        metrics: metrics in which the sessions are counted.
    """

    def __init__(self, engine: DraftEngine, targets: Sequence[str], offer: Offer, metrics: Metrics) -> None:
        self._engine = engine
        self._offer = offer
        self._metrics = metrics
        self._streams: dict[str, tuple[PoolStream, asyncio.Task[None]]] = {}
        self._task = asyncio.create_task(self._serve(targets))

    @property
    def fault(self) -> str | None:
        """See `Work`."""
        is_attached = any(stream.is_attached for stream, _ in self._streams.values())
        return self._engine.fault or (None if is_attached else "no target has this worker in its pool")

    @property
    def hangs(self) -> bool:
        """See `Work`."""
        return self._engine.hangs

    @property
    def broken(self) -> str | None:
        """See `Work`."""
        return self._engine.broken

    @property
    def vocabulary_share(self) -> float:
        """Return the share of a target's ids that the draft can propose, the least of its targets'."""
        return min((stream.vocabulary.share_of(stream.vocab_size) for stream, _ in self._streams.values()), default=1.0)

    async def refused(self) -> None:
        """Wait until all targets refuse this worker; return only by an error.

        Raises:
            RequestError: refusal of the last target.
            HandshakeError: the last target is not trusted.
        """
        await asyncio.shield(self._task)

    async def stop(self, *, grace_s: float) -> None:
        """Leave at once, without a grace period: the sessions continue at their targets."""
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
        """Replace the set of targets, and share the slots among them."""
        for address in self._streams.keys() - addresses.keys():
            self._streams.pop(address)[1].cancel()
        share = max(1, self._offer.num_slots // max(1, len(addresses)))
        for stream, _ in self._streams.values():
            stream.resize(share)
        for address in addresses.keys() - self._streams.keys():
            security = named(self._offer.security, addresses[address])
            offer = replace(self._offer, num_slots=share, security=security)
            stream = PoolStream(self._engine, address, offer, self._metrics)
            self._streams[address] = stream, group.create_task(self._run(stream))

    async def _run(self, stream: PoolStream) -> None:
        """Serve one target. If it refuses the worker, dial it again later; fail if all targets refuse the worker."""
        while True:
            try:
                await stream.run()
            except (RequestError, HandshakeError) as refusal:
                stream.is_refused = True
                if all(each.is_refused for each, _ in self._streams.values()):
                    raise
                logger.warning("goes on without a target that refuses it, or is not trusted: %s", refusal)
            await asyncio.sleep(REFUSED_S * random.uniform(0.5, 1.5))


class PoolStream:
    """Assist stream to one target, reopened whenever it is lost.

    Args:
        engine: draft engine, which the streams to other targets share.
        address: HOST:PORT of the target.
        offer: offer to this target.
        metrics: metrics in which the sessions are counted.

    Attributes:
        is_attached: True while the target has this worker in its pool.
        is_refused: True if the target's latest answer was a refusal.
        vocab_size: size of the target's vocabulary as its latest session names it; at first the draft's.
    """

    def __init__(self, engine: DraftEngine, address: str, offer: Offer, metrics: Metrics) -> None:
        self._engine = engine
        self.address = address
        self._offer = offer
        self._metrics = metrics
        self.is_attached = self.is_refused = False
        self.vocab_size = offer.vocabulary.size
        self._words: TargetWords | None = None  # of a target with another tokenizer
        self._outbox: asyncio.Queue[pb.AssistRequest] = asyncio.Queue(MAX_OUTBOX)
        self._sessions: dict[str, PoolSession] = {}

    async def run(self) -> None:
        """Draft for the target's sessions. Dial again, without end, when the target fails or cannot be reached.

        Raises:
            RequestError: the target refuses this worker.
            HandshakeError: the target can be reached but not trusted.
        """
        lost = False
        credentials = credentials_of(self._offer.security)
        async with open_channel(self.address, credentials, options=WORKER_OPTIONS) as channel:
            stub = rpc.VerificationServiceStub(channel)
            while True:
                try:
                    await self._attach(stub)
                    lost = False
                except RequestError:
                    raise
                except SpecDecError as exc:
                    await check_link(self.address, self._offer.security)
                    if not lost:
                        logger.warning("no target, dialling until there is one: %s", exc)
                    lost = True
                await asyncio.sleep(random.uniform(0.0, 2 * REDIAL_S))  # many workers must not dial at the same moment

    def resize(self, num_slots: int) -> None:
        """Announce the new slot count to the target."""
        if num_slots != self._offer.num_slots:
            self._offer = replace(self._offer, num_slots=num_slots)
            self._notify(pb.AssistRequest(slots=pb.AssistSlots(num_slots=num_slots)))

    def _notify(self, message: pb.AssistRequest) -> None:
        """Queue a message, or drop it if the queue is full."""
        if not self._outbox.full():
            self._outbox.put_nowait(message)

    async def _attach(self, stub: rpc.VerificationServiceStub) -> None:
        """Open one stream to the target, and draft until it ends."""
        call, words = stub.Assist(), self.vocabulary
        self._outbox = asyncio.Queue(MAX_OUTBOX)
        attach = pb.Attach(
            protocol_version=PROTOCOL_VERSION,
            tokenizer_fingerprint=words.fingerprint,
            vocab_size=words.size,
            num_slots=self._offer.num_slots,
            takes_tokenizer=self._offer.learn is not None,
        )
        dialled = time.monotonic()
        try:
            with calls_to(self.address):
                await call.write(pb.AssistRequest(attach=attach))
                answer = await call.read()
                if isinstance(answer, pb.AssistResponse):
                    round_trip_s = time.monotonic() - dialled
                    await self._learn(answer.attached)
                    logger.info("attached as %s", answer.attached.worker_id)
                    self.is_attached, self.is_refused = True, False
                    await self._draft(call, round_trip_s)
        finally:
            self.is_attached = False
            call.cancel()

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary in whose ids this worker drafts for the target."""
        return self._offer.vocabulary if self._words is None else self._words.vocabulary

    async def _learn(self, attached: pb.Attached) -> None:
        """Draft in the ids of the target's tokenizer, if it sent one; the next streams to it need not send it again.

        Raises:
            IncompatibleDraftError: the draft has too few of its tokens.
        """
        if attached.tokenizer and self._offer.learn is not None:
            eos = frozenset(attached.eos_token_ids)
            tokenizer = await asyncio.to_thread(Tokenizer.unpacked, attached.tokenizer, eos)
            self._words = await asyncio.to_thread(self._offer.learn, tokenizer)

    async def _draft(self, call: AssistCall, round_trip_s: float) -> None:
        """Handle the target's messages until the stream ends; then close its sessions."""
        link = Link()
        link.record_round_trip(round_trip_s)
        writer = asyncio.create_task(self._write(call))
        try:
            while isinstance(message := await call.read(), pb.AssistResponse):
                self._handle(message, link)
        finally:
            writer.cancel()
            while self._sessions:
                self._sessions.popitem()[1].close()

    async def _write(self, call: AssistCall) -> None:
        while True:
            await call.write(await self._outbox.get())

    def _handle(self, message: pb.AssistResponse, link: Link) -> None:
        kind = message.WhichOneof("message")
        if kind == "open":
            self._close(message.open.session_id)
            with request_context(ANYBODY, harmless_id(message.open.request_id)):
                self._try(message.open.session_id, partial(self._open, message.open, link))
        elif kind == "commit" and message.commit.session_id in self._sessions:
            self._try(message.commit.session_id, partial(self._commit, message.commit))
        elif kind == "close":
            self._close(message.close.session_id)

    def _try(self, session_id: str, action: Callable[[], None]) -> None:
        """Run an action of one session; if it fails, close this session and decline it, and keep the others."""
        try:
            action()
        except (CapacityError, RequestError, UnavailableError) as exc:
            context = self._sessions[session_id].context if session_id in self._sessions else copy_context()
            context.run(logger.warning, "session %s gets no draft: %s", session_id, exc)
            self._close(session_id)
            self._notify(pb.AssistRequest(decline=pb.AssistDecline(session_id=session_id)))

    def _close(self, session_id: str) -> None:
        if (session := self._sessions.pop(session_id, None)) is not None:
            session.close()

    def _commit(self, message: pb.AssistCommit) -> None:
        commit = commit_from_message(message.commit)
        check_token_ids(commit.token_ids, vocab_size=self.vocab_size)
        self._sessions[message.session_id].commit(commit)

    def _open(self, message: pb.AssistOpen, link: Link) -> None:
        request = open_from_message(message.open)
        # Sizes are bounded, since the counts of a session with penalties have an entry per id.
        fingerprint = message.open.tokenizer_fingerprint or self.vocabulary.fingerprint
        require_one_vocabulary(self.vocabulary, Vocabulary(fingerprint, self.vocabulary.size))
        self.vocab_size = replace(self.vocabulary, size=message.open.vocab_size or self.vocab_size).size
        check_token_ids(request.prompt_token_ids, vocab_size=self.vocab_size)
        if request.gamma is None:
            request = replace(request, gamma=self._offer.gamma)

        async def send(propose: pb.Propose) -> None:
            proposal = pb.AssistPropose(session_id=message.session_id, propose=propose)
            await self._outbox.put(pb.AssistRequest(propose=proposal))

        proposals = ProposalSender(send, link)
        session = PoolSession(
            self._engine, request, proposals, self._metrics, vocab_size=self.vocab_size, words=self._words
        )
        self._sessions[message.session_id] = session


class PoolSession:
    """Draft side of one session of a target, whose vocabulary has `vocab_size` ids.

    Attributes:
        context: context variables from which log records take the request's id.

    Raises:
        CapacityError, UnavailableError: the engine accepts no session.
    """

    def __init__(
        self,
        engine: DraftEngine,
        request: GenerationRequest,
        proposals: ProposalSender,
        metrics: Metrics,
        *,
        vocab_size: int,
        words: TargetWords | None = None,
    ) -> None:
        self._engine = engine
        self._words = words
        self._proposals = proposals
        self._draft = engine.open(
            request.prompt_token_ids,
            request.effective_sampling(),
            output_start=request.output_start,
            cache_salt=request.cache_salt,
            vocab_size=vocab_size,
            words=words,
        )
        self._runner = Runner(engine, self._draft, proposals.link, gamma=request.gamma or 0)
        self._end = len(request.prompt_token_ids) + request.max_new_tokens
        self._metrics = metrics.request()
        self.context = copy_context()
        self._tasks = [asyncio.create_task(proposals.run(self._draft))]
        if request.grammar is not None:  # in a task, since commits may come meanwhile
            self._tasks.append(asyncio.create_task(self._add_grammar(request.grammar)))

    async def _add_grammar(self, grammar: Grammar) -> None:
        """Compile the grammar, and let the draft obey it from then on."""
        try:
            self._draft.grammar = await self._engine.compiled(grammar, self._words)
        except SpecDecError as exc:  # the target accepted it: versions differ, or this worker is busy
            logger.warning("a session is drafted for without its grammar: %s", exc)

    def commit(self, commit: Commit) -> None:
        """Apply a commit. Its first tokens may be known already, from the message that opened the session.

        Raises:
            InvalidRequestError: tokens before the commit are missing, or it exceeds the session's limit.
        """
        num_tokens, end = len(self._draft.committed), commit.position + len(commit.token_ids)
        if commit.position > num_tokens:
            raise InvalidRequestError(f"a commit is for position {commit.position}, {num_tokens} is next")
        if end > self._end:
            raise InvalidRequestError(f"a commit ends at position {end}, the session's limit is {self._end}")
        self._metrics.take(commit)
        self._proposals.answered(commit)
        self._runner.commit(commit, num_known=num_tokens - commit.position)

    def close(self) -> None:
        """End the session's tasks, and free its slot of the draft engine."""
        for task in self._tasks:
            task.cancel()
        self._metrics.left()
        self._engine.close(self._draft)
