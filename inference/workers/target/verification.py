"""VerificationService over a target engine: one stream is one session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from grpc_comm.call import Call
from grpc_comm.options import max_request_bytes
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.caller import caller
from inference.commit import Answer, Commit, Opened, Started, TokenLogprobs
from inference.engine.contract import VerificationEngine, VerificationSession
from inference.engine.pool import DraftPool
from inference.errors import IncompatibleDraftError, InvalidRequestError, UnavailableError
from inference.request import Provenance
from inference.speculation.tree import MAX_TREE_TOKENS
from inference.text.grammar_source import grammar_version
from inference.text.tokenizer import MAX_PACKED_BYTES
from inference.text.vocabulary import Vocabulary, require_one_vocabulary
from inference.workers.completion import ModelCard
from inference.workers.convert import (
    PROTOCOL_VERSION,
    branches_from_message,
    commit_to_message,
    open_from_message,
)
from inference.workers.observer import Observer
from inference.workers.scored import ScoreWriter
from inference.workers.target.assist import StreamWorker, serve_worker

LINGER_S = 2.0
"""Seconds that a finished stream stays open for drafts under way, unless the draft ends it first. A write that meets a
closed stream would fail the draft's call as a whole, with the last commits unread."""


class VerificationServicer(rpc.VerificationServiceServicer):  # type: ignore[misc]
    """Translator between VerificationService and the engine; owns no algorithm.

    Args:
        engine: engine that verifies.
        pool: pool of the draft workers that attach.
        card: card of the target; draft workers must have its vocabulary, or take its tokenizer, and resumed sessions
            have its model.
        idle_timeout_s: seconds that a session may hold its slot without a proposal.
        observer: observes every session.
    """

    service_name = pb.DESCRIPTOR.services_by_name["VerificationService"].full_name

    def __init__(
        self,
        engine: VerificationEngine[Any],
        pool: DraftPool,
        card: ModelCard,
        *,
        idle_timeout_s: float,
        observer: Observer,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._vocabulary = Vocabulary(card.tokenizer_fingerprint, card.vocab_size)
        self._tokenizer = card.tokenizer
        self._model_id = card.model_id
        self._idle_timeout_s = idle_timeout_s
        self._observer = observer
        self._writer = ScoreWriter()

    @property
    def max_request_bytes(self) -> int:
        """See `Servicer`."""
        return max_request_bytes(self._engine.max_length)

    def add_to(self, server: grpc.aio.Server) -> None:
        """See `Servicer`."""
        rpc.add_VerificationServiceServicer_to_server(self, server)

    async def Verify(self, _: object, call: Call) -> None:
        """Serve one session from Open to its last Commit."""
        # 1. Open: check that draft and target fit, queue for a slot.
        session = await self._open((await _first(call, "open", of="a session")).open)
        # 2. Three tasks run at once: one reads proposals, one watches for silence, this one writes commits.
        reading = asyncio.create_task(self._read_proposals(session, call))
        watching = asyncio.create_task(self._watch(session))
        try:
            await call.write(self._opened(session))
            scores: tuple[TokenLogprobs, ...] = ()  # scores of the prompt, sent with the first commit
            async with aclosing(self._answer(session, call.deadline)) as events:
                async for event in events:
                    if isinstance(event, Opened):
                        scores = event.prompt_logprobs
                    else:
                        await self._writer.write(call, partial(_committed, scores), event, scores)
                        scores = ()
            # 3. Finished: a draft that ran ahead has proposals on their way, which must find the stream open.
            if session.runs_ahead:
                await asyncio.wait([reading], timeout=LINGER_S)
        finally:
            # 4. However it ends, the slot is free at once.
            for task in (reading, watching):
                task.cancel()
            self._engine.close(session)

    async def _answer(self, session: VerificationSession, deadline: float | None) -> AsyncGenerator[Answer, None]:
        request = session.request
        with self._observer.request(deadline) as observation:
            observation.take(Started(len(request.prompt_token_ids), request.sampling.seed))
            async with aclosing(self._engine.answer(session)) as events:
                async for event in events:
                    observation.take(event)
                    yield event

    async def Assist(self, _: object, call: Call) -> None:
        """Serve one draft worker of the pool until it leaves."""
        attach = (await _first(call, "attach", of="a pool worker")).attach
        attached = await self._attached(attach)
        await serve_worker(StreamWorker(attach, self._vocabulary), self._pool, call, attached)

    async def _attached(self, attach: pb.Attach) -> pb.Attached:
        """Return the answer to a worker, with the tokenizer if it has another one, and takes this one."""
        attached = pb.Attached(pass_us=self._engine.pass_us)
        has_ours = attach.tokenizer_fingerprint == self._vocabulary.fingerprint
        if not has_ours and attach.takes_tokenizer and self._tokenizer is not None:
            packed = await asyncio.to_thread(self._tokenizer.packed)
            if len(packed) <= MAX_PACKED_BYTES:
                attached.tokenizer = packed
                attached.eos_token_ids.extend(sorted(self._tokenizer.eos_token_ids))
                attach.tokenizer_fingerprint = self._vocabulary.fingerprint  # the worker's from now on
        self._check_fits(attach, one_size=False)
        return attached

    async def _open(self, message: pb.Open) -> VerificationSession:
        self._check_fits(message, one_size=True)
        self._check_resumes(message)
        request = open_from_message(message)
        request = replace(request, cache_salt=caller().cache_salt(request.cache_salt))
        session: VerificationSession = self._engine.open(
            request, drafted=True, grammar=await self._engine.compiled(request)
        )
        return session

    def _check_fits(self, message: pb.Open | pb.Attach, *, one_size: bool) -> None:
        """Refuse a draft that does not fit; one of a session names the size of its target's vocabulary."""
        if message.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleDraftError(
                f"the draft speaks protocol version {message.protocol_version}, the target {PROTOCOL_VERSION}"
            )
        words = Vocabulary(message.tokenizer_fingerprint, message.vocab_size)
        require_one_vocabulary(words, self._vocabulary, one_size=one_size)

    def _check_resumes(self, message: pb.Open) -> None:
        """Refuse to continue a sequence of another model; a draft worker may leave the origin open."""
        if message.num_committed_tokens:
            begun = Provenance(message.model_id or self._model_id, message.grammar.version or grammar_version())
            begun.require_same(Provenance(self._model_id, grammar_version()))

    def _opened(self, session: VerificationSession) -> pb.VerifyResponse:
        opened = pb.Opened(
            session_id=session.id,
            max_length=self._engine.max_length,
            max_tree_tokens=MAX_TREE_TOKENS,
            pass_us=self._engine.pass_us,
            model_id=self._model_id,
            grammar_version=grammar_version() if session.request.grammar is not None else "",
            num_cached_tokens=session.num_cached_tokens,
        )
        return pb.VerifyResponse(opened=opened)

    async def _read_proposals(self, session: VerificationSession, call: Call) -> None:
        """Feed the session until its stream ends; a bad message ends the session."""
        try:
            while (message := await call.read()) != grpc.aio.EOF:
                if message.WhichOneof("message") != "propose":
                    raise InvalidRequestError("a session has one Open; every later message must be Propose")
                self._engine.propose(session, branches_from_message(message.propose))
            self._end(session, InvalidRequestError("the draft closed its side before the session was finished"))
        except Exception as exc:
            self._end(session, exc)

    async def _watch(self, session: VerificationSession) -> None:
        """End a session after `idle_timeout_s` without a proposal, so that its slot serves others."""
        while True:
            left_s = self._idle_timeout_s - session.idle_s
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        self._end(session, UnavailableError(f"no proposal came for {self._idle_timeout_s:g} s"))

    def _end(self, session: VerificationSession, error: Exception) -> None:
        """Fail a session and free its slot now, since the write that reports the failure may hang."""
        session.fail(error)
        self._engine.close(session)


def _committed(scores: Sequence[TokenLogprobs], commit: Commit) -> pb.VerifyResponse:
    return pb.VerifyResponse(commit=commit_to_message(commit, scores))


async def _first(call: Call, kind: str, *, of: str) -> Any:
    """Return the first message of a stream, which must be of this kind."""
    message = await call.read()
    if message == grpc.aio.EOF or message.WhichOneof("message") != kind:
        raise InvalidRequestError(f"the first message of {of} must be {kind.capitalize()}")
    return message
