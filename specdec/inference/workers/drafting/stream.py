"""Draft worker's end of the gRPC stream Assist to one target, which serves all requests that the worker drafts for."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import grpc

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.caller import ANYBODY, request_context, safe_request_id
from specdec.inference.config import PLAIN, DialSecurity, usable_core_ids
from specdec.inference.engine.draft import DraftEngine, TargetWords
from specdec.inference.engine.target import check_token_ids
from specdec.inference.errors import (
    CapacityError,
    HandshakeError,
    InvalidRequestError,
    RequestError,
    SpecDecError,
    UnavailableError,
)
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest, Noise
from specdec.inference.scheduling.link import Link
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary, require_one_vocabulary
from specdec.inference.workers.calls.convert import (
    MAX_NAME_CHARACTERS,
    PROTOCOL_VERSION,
    commit_from_message,
    noise_from_message,
    open_from_message,
    padded,
)
from specdec.inference.workers.calls.dialling import check_link
from specdec.inference.workers.calls.status import calls_to
from specdec.inference.workers.drafting.session import DraftingSession, ProposalSender

logger = logging.getLogger(__name__)

REDIAL_S = 1.0
"""Mean wait in seconds before a lost target is dialled again."""
REFUSED_S = 60.0
"""Mean wait in seconds before a target that refused the worker is dialled again."""
MAX_OUTBOX = 256
"""Most messages that may wait to be sent to a target. While so many wait, a message with draft tokens waits to be
queued, and any other message is dropped."""

Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[grpc.aio.Channel]]
AssistCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.AssistRequest, pb.AssistResponse]"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a draft worker offers to a target when it attaches, and how it connects.

    Attributes:
        vocabulary: vocabulary of the token ids in which the engine drafts.
        gamma: most draft tokens of one pass, for requests that set no gamma.
        num_slots: number of requests for which the worker can draft at a time.
        security: credentials of the worker, and the certificate authorities that it trusts.
        learn: function that prepares drafting for a target with another tokenizer; None: such targets are refused.
        num_threads: number of CPU threads of the draft model; 0: not known.
    """

    vocabulary: Vocabulary
    gamma: int
    num_slots: int
    security: DialSecurity = PLAIN
    learn: Callable[[Tokenizer], TargetWords] | None = None
    num_threads: int = 0


class AssistStream:
    """Assist stream of a draft worker to one target, with a session for each request of the target that it drafts for.

    Args:
        engine: engine of the draft model, which the streams to all targets share.
        address: HOST:PORT of the target.
        offer: what the worker offers to this target.
        metrics: metrics in which the sessions are counted; None for a private worker, which drafts only for the
            requests of its own process, and counts these elsewhere.

    Attributes:
        attached: event that is set while the target has this worker in its pool.
        is_refused: True if the target's latest answer was a refusal.
        link: measured times of messages to the target and back, as of the latest session.
        vocab_size: number of the target's token ids, as its latest session gives it; at first the draft's.
    """

    def __init__(self, engine: DraftEngine, address: str, offer: Offer, metrics: Metrics | None = None) -> None:
        self._engine = engine
        self.address = address
        self._offer = offer
        self._metrics = metrics
        self._is_private = metrics is None
        self.attached = asyncio.Event()
        self.is_refused = False
        self._is_held = False  # the target has stopped all drafting
        self._num_unheard = 0  # requests in a row that no draft token reached
        self.vocab_size = offer.vocabulary.size
        self._words: TargetWords | None = None  # of a target with another tokenizer
        self._noise = Noise.SPECDEC
        self._outbox: asyncio.Queue[pb.AssistRequest | None] = asyncio.Queue(MAX_OUTBOX)  # None ends the stream
        self._sessions: dict[str, DraftingSession] = {}
        self.link = Link()
        self._dial_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, connect: Connect, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Draft for the target's requests without end; if the target refuses this worker, ask again later.

        Args:
            connect: function that opens a channel, which is used until the next refusal.
            goes_on: function that is asked after each refusal; if it returns False, the refusal is raised.

        Raises:
            RequestError: the target refused this worker, and `goes_on` returned False.
            HandshakeError: the target can be reached but not trusted, and `goes_on` returned False.
        """
        while True:
            try:
                async with connect() as channel:
                    await self.run(channel)
            except (RequestError, HandshakeError) as refusal:
                self.is_refused = True
                if not goes_on():
                    raise
                logger.warning("requests at %s go on without drafts: %s", self.address, refusal)
            await asyncio.sleep(REFUSED_S * random.uniform(0.5, 1.5))

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Draft for the target's requests without end; when the target fails or cannot be reached, connect again.

        Raises:
            RequestError: the target refuses this worker.
            HandshakeError: the target can be reached but not trusted.
        """
        lost = False
        while True:
            self._dial_now.clear()
            try:
                await self._attach(channel)
                lost = False
            except RequestError:
                raise
            except SpecDecError as exc:
                await check_link(self.address, self._offer.security)
                if not lost:
                    logger.warning("a target is away, dialling until it is back: %s", exc)
                lost = True
            with suppress(TimeoutError):  # many workers must not dial at the same moment
                async with asyncio.timeout(random.uniform(0.0, 2 * REDIAL_S)):
                    await self._dial_now.wait()

    def dial_now(self) -> None:
        """End the present wait before the next attempt to reach the target, because the target serves again."""
        self._dial_now.set()

    @property
    def is_attached(self) -> bool:
        return self.attached.is_set()

    def resize(self, num_slots: int) -> None:
        """Offer the target from now on to draft for `num_slots` of its requests at a time."""
        if num_slots != self._offer.num_slots:
            self._offer = replace(self._offer, num_slots=num_slots)
            self._notify(pb.AssistRequest(slots=pb.AssistSlots(num_slots=num_slots)))

    def _notify(self, message: pb.AssistRequest | None) -> None:
        """Queue a message for the target, or drop it if the queue is full; None ends the stream."""
        if not self._outbox.full():
            self._outbox.put_nowait(message)

    async def _attach(self, channel: grpc.aio.Channel) -> None:
        """Attach to the target over `channel`, and draft for its requests until the stream ends.

        Raises:
            SpecDecError: the target refuses this worker, fails, or cannot be reached.
        """
        call, words = rpc.VerificationServiceStub(channel).Assist(), self.vocabulary
        self._outbox = asyncio.Queue(MAX_OUTBOX)
        attach = pb.Attach(
            protocol_version=PROTOCOL_VERSION,
            tokenizer_fingerprint=words.fingerprint,
            vocab_size=words.size,
            num_slots=self._offer.num_slots,
            is_private=self._is_private,
            takes_tokenizer=self._offer.learn is not None,
            takes_hold=True,
            cpu_ids=usable_core_ids(),
            num_threads=self._offer.num_threads,
        )
        dialled = time.monotonic()
        try:
            with calls_to(self.address):
                await call.write(pb.AssistRequest(attach=attach))
                answer = await call.read()
                if isinstance(answer, pb.AssistResponse):
                    round_trip_s = time.monotonic() - dialled
                    await self._learn(answer.attached)
                    logger.info("attached as %s at %s", answer.attached.worker_id, self.address)
                    self.link = Link()
                    self.link.record_round_trip(round_trip_s)
                    self.is_refused = False
                    self.attached.set()
                    await self._draft(call, channel)
        finally:
            self.attached.clear()
            self._is_held = False
            call.cancel()

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the token ids in which this worker drafts for the target."""
        return self._offer.vocabulary if self._words is None else self._words.vocabulary

    async def _learn(self, attached: pb.Attached) -> None:
        """Keep what the target's answer to this worker says: its rule for random numbers, and perhaps its tokenizer.

        Raises:
            IncompatibleDraftError: the tokenizer cannot be read, or the draft has too few of the target's tokens.
        """
        self._noise = noise_from_message(attached.noise)
        if attached.tokenizer and self._offer.learn is not None:
            eos = frozenset(attached.eos_token_ids)
            tokenizer = await asyncio.to_thread(Tokenizer.unpacked, attached.tokenizer, eos)
            self._words = await asyncio.to_thread(self._offer.learn, tokenizer)

    async def _draft(self, call: AssistCall, channel: grpc.aio.Channel) -> None:
        """Handle the target's messages until the stream ends; then stop drafting for all of the target's requests."""
        writer, following = asyncio.create_task(self._write(call)), asyncio.create_task(self._follow(channel))
        self._tasks = {writer, following}
        try:
            while isinstance(message := await call.read(), pb.AssistResponse):
                self._handle(message)
        finally:
            for task in self._tasks:
                task.cancel()
            while self._sessions:
                self._sessions.popitem()[1].close()

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """For a private worker, open the stream anew once the channel has left its connection for another one.

        A private worker's draft tokens must use the same connection as its process's requests. These get a new one when
        the server takes no more calls on the old one, or when certificates change; a running stream would stay there.
        """
        if self._is_private:
            with suppress(grpc.aio.UsageError):  # the channel is closed, and the stream ends with it
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            self._reopen()

    def _reopen(self) -> None:
        self._notify(None)
        self.dial_now()

    async def _write(self, call: AssistCall) -> None:
        """Send queued messages to the target, until the queue gives None, and then end this side of the stream.

        Only this task writes to the stream, since cancelling a write would end the whole stream.
        """
        while (message := await self._outbox.get()) is not None:
            await call.write(message)
        await call.done_writing()

    def _handle(self, message: pb.AssistResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "open":
            if (length := len(message.open.session_id)) > MAX_NAME_CHARACTERS:
                raise InvalidRequestError(
                    f"a session's name has {length} characters, the limit is {MAX_NAME_CHARACTERS}"
                )
            self.close(message.open.session_id)
            with request_context(ANYBODY, safe_request_id(message.open.request_id)):
                self._try(message.open.session_id, partial(self._open, message.open))
        elif kind == "commit" and message.commit.session_id in self._sessions:
            self._try(message.commit.session_id, partial(self._commit, message.commit))
        elif kind == "close":
            self.close(message.close.session_id)
        elif kind == "hold":
            self._hold(message.hold)

    def _hold(self, message: pb.AssistHold) -> None:
        """Stop drafting for all of the target's requests if `is_on` of the message is True, else draft again.

        After stopping, tell the target once the running step of the draft model has ended.
        """
        self._is_held = message.is_on
        for session in self._sessions.values():
            session.hold(is_on=message.is_on)
        if message.is_on:
            self._tasks.add(task := asyncio.create_task(self._acknowledge(message.number)))
            task.add_done_callback(self._tasks.discard)

    async def _acknowledge(self, number: int) -> None:
        await self._engine.until_step_ends()
        self._notify(pb.AssistRequest(held=pb.AssistHeld(number=number)))

    def _try(self, session_id: str, action: Callable[[], None]) -> None:
        """Run `action`, which is about one session; if it fails, stop drafting for it, and tell the target."""
        try:
            action()
        except (CapacityError, RequestError, UnavailableError) as exc:
            self.decline(session_id, exc)

    def close(self, session_id: str) -> None:
        """Stop drafting for the session of this name; do nothing if this stream has no such session."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            session.close()

    def decline(self, session_id: str, reason: BaseException) -> None:
        """Stop drafting for a session, log the reason, and tell the target not to wait for its draft tokens."""
        context = self._sessions[session_id].context if session_id in self._sessions else copy_context()
        context.run(logger.warning, "session %s gets no draft: %s", session_id, reason)
        self.close(session_id)
        self._notify(pb.AssistRequest(decline=pb.AssistDecline(session_id=session_id)))

    def _ended(self, session_id: str, drafting: asyncio.Task[None]) -> None:
        """Stop drafting for a session whose task `drafting` has failed, and tell the target.

        Do nothing if the task was cancelled, which means that the session was closed.
        """
        if not drafting.cancelled() and (error := drafting.exception()) is not None:
            self.decline(session_id, error)

    def judge(self, session: DraftingSession) -> None:
        """Check, after a request has ended, whether its draft tokens reached the target; if not, open the stream anew.

        If none reached it for the next request either, log a warning: a proxy may connect the stream and the requests
        to different servers.
        """
        if session not in self._sessions.values() or session.is_heard is None:
            return
        self._num_unheard = 0 if session.is_heard else self._num_unheard + 1
        if self._num_unheard == 1:
            self._reopen()
        elif self._num_unheard == 2:
            logger.warning(
                "no draft token reached %s: a proxy may send calls of one connection to different servers", self.address
            )

    def _commit(self, message: pb.AssistCommit) -> None:
        commit = commit_from_message(message.commit)
        check_token_ids(commit.token_ids, vocab_size=self.vocab_size)
        self._sessions[message.session_id].commit(commit)

    def _open(self, message: pb.AssistOpen) -> None:
        opened = message.open
        fingerprint = opened.tokenizer_fingerprint or self.vocabulary.fingerprint
        require_one_vocabulary(self.vocabulary, Vocabulary(fingerprint, self.vocabulary.size))
        self.begin(message.session_id, open_from_message(opened), vocab_size=opened.vocab_size)

    def begin(self, session_id: str, request: GenerationRequest, *, vocab_size: int = 0) -> DraftingSession:
        """Begin to draft for a request; return the session.

        Args:
            session_id: name by which the target knows the session.
            request: the request; its prompt ends with the output tokens that are committed already.
            vocab_size: number of the target's token ids; 0 if it is not known.

        Raises:
            InvalidRequestError: a token id of the prompt is outside the target's vocabulary.
            CapacityError, UnavailableError: the engine accepts no session.
        """
        # Sizes are bounded, since the counts of a session with penalties have an entry per id.
        self.vocab_size = replace(self.vocabulary, size=vocab_size or self.vocab_size).size
        check_token_ids(request.prompt_token_ids, vocab_size=self.vocab_size)
        gamma = self._offer.gamma if request.gamma is None else request.gamma
        request = replace(request, gamma=gamma, sampling=replace(request.sampling, noise=self._noise))

        async def send(propose: pb.Propose) -> None:
            proposal = pb.AssistPropose(session_id=session_id, propose=propose)
            await self._outbox.put(padded(pb.AssistRequest(propose=proposal)))

        link = self.link = Link(self.link)
        proposals = ProposalSender(send, link)
        session = DraftingSession(
            self._engine,
            request,
            proposals,
            vocab_size=self.vocab_size,
            words=self._words,
            metrics=self._metrics,
        )
        session.hold(is_on=self._is_held)
        self._sessions[session_id] = session
        session.drafting.add_done_callback(partial(self._ended, session_id))
        return session
