"""Engine of a target model: in each pass it decodes many sessions, and verifies the draft tokens that they have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

from specdec.inference.commit import Commit, TokenEvent
from specdec.inference.config import ALWAYS, DEFAULT_PROMPT_SHARE
from specdec.inference.engine.batching import Batching
from specdec.inference.engine.contract import DecodesAlone
from specdec.inference.engine.drafting import Drafting, OwnDraft, concern_drafting
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.loop import PASS_TIMEOUT_S, Engine
from specdec.inference.engine.target_session import Looking, TargetSession
from specdec.inference.errors import CapacityError, ContextLengthError, InvalidRequestError
from specdec.inference.model.decoder import Decoder, Matcher, Turn, Verdict, check_request, is_seed_invariant
from specdec.inference.model.slots import PrefixKeeper
from specdec.inference.request import MAX_GAMMA, GenerationRequest, Noise, Schedule
from specdec.inference.scheduling.quiet import Pass
from specdec.inference.speculation.answers import KeptAnswers
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from specdec.inference.speculation.tree import Branch

MAX_PASS_DRAFT_TOKENS = 16
"""Default limit of the draft tokens of one session in one pass."""
UNREAD_BYTES_OF_CALL = 8 * 1024 * 1024
"""Most bytes of commits of one answer that its reader has not read: some 2000 tokens with 20 log-probabilities each."""
UNREAD_BYTES = 256 * 1024 * 1024
"""Most bytes of unread commits of all answers together; an answer also counts after its session left its slot."""

_Timed = tuple[Verdict, float, float]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits and options of a target engine.

    Attributes:
        max_waiting: most sessions that may queue for a slot.
        gamma: most draft tokens of one session in one pass, unless the request sets its own.
        eos_token_ids: the model's end-of-sequence tokens, for requests that stop at them.
        pass_timeout_s: seconds after which the engine assumes that a pass will never end.
        prefix_caching: True if a request may reuse a prefix that an earlier request left in a slot.
        lookup: True to propose tokens found in the session's own text (prompt lookup) when no draft tokens have
            arrived.
        prompt_share: longest time that reading prompts may add to a pass in which others decode, as a multiple of the
            pass.
        num_spare: number of the decoder's slots that only keep cached prefixes of sessions that left; see `Admission`.
        noise: rule by which a seed gives the random numbers of a choice of tokens (docs/noise.md), for all requests.
        drafting: when draft workers may compute: a mode of `Drafting`.
        width: most draft tokens of one session in one pass that are copied from the prediction in its request (OpenAI's
            predicted output), or from an earlier answer that is kept.
        answers_bytes: memory for earlier answers, in which draft tokens are looked up, in bytes; 0 keeps none.
    """

    max_waiting: int = 64
    gamma: int = MAX_PASS_DRAFT_TOKENS
    eos_token_ids: frozenset[int] = frozenset()
    pass_timeout_s: float = PASS_TIMEOUT_S
    prefix_caching: bool = True
    lookup: bool = True
    prompt_share: float = DEFAULT_PROMPT_SHARE
    num_spare: int = 0
    noise: Noise = Noise.SPECDEC
    drafting: str = ALWAYS
    width: int = MAX_GAMMA
    answers_bytes: int = 0


class TargetEngine(DecodesAlone, Engine[TargetSession, Turn, _Timed]):
    """Engine of a target model: it decodes requests, with or without draft tokens, and verifies draft workers' tokens.

    Args:
        decoder: decoder that runs the steps.
        limits: limits of requests, passes and times.
        grammars: compiler of requests' grammars; without it, requests with a grammar are refused.

    Attributes:
        drafting: on-off switch of drafting.
        max_length: most tokens of prompt and output together.
        vocab_size: number of token ids.
        seed_invariant: True if a request with a seed gets the same tokens from every engine of the same model.
    """

    def __init__(
        self, decoder: Decoder, limits: EngineLimits = EngineLimits(), grammars: Grammars | None = None
    ) -> None:
        super().__init__(
            decoder,
            max_waiting=limits.max_waiting,
            prefix_caching=limits.prefix_caching,
            pass_timeout_s=limits.pass_timeout_s,
            num_spare=limits.num_spare,
        )
        self._decoder = decoder
        self._limits = limits
        self._grammars = grammars
        windows = getattr(decoder.slots, "windows", None) if isinstance(decoder, PrefixKeeper) else None
        self._batching = Batching(limits.prompt_share, decoder.prompt_chunk_tokens, windows)
        self.drafting = Drafting(limits.drafting, self.wake)
        if isinstance(decoder, SpeculativeDecoder):
            self.drafting.follow(OwnDraft())
        self._answers = KeptAnswers(limits.answers_bytes)
        self._unread: WeakSet[TargetSession] = WeakSet()  # until their readers have left
        self.max_length, self.vocab_size = decoder.max_length, decoder.vocab_size
        self.seed_invariant = is_seed_invariant(decoder)

    @property
    def pass_us(self) -> int:
        """Return the recent median time of a pass over one session, in microseconds; 0 if unknown.

        It is the time without draft tokens, if such passes were measured.
        """
        return round(self._batching.pass_s * 1e6)

    @property
    def schedule(self) -> Schedule:
        """Return the schedule, synchronous or run-ahead drafting, for requests that set none.

        It is the one that gives most tokens per second at the present number of sessions.
        """
        return self._batching.schedule(len(self._admission.running) + len(self._admission.waiting))

    async def compiled(self, request: GenerationRequest) -> Matcher | None:
        """Return the request's grammar, compiled for `open`; None without one.

        Raises:
            InvalidRequestError: the grammar has a fault, or the decoder cannot keep to grammars.
            CapacityError: too many grammars are being compiled.
        """
        if request.grammar is None:
            return None
        check_request(self._decoder, request)
        if self._grammars is None:
            raise InvalidRequestError("grammar: this server has no compiler of grammars", field="grammar")
        return await self._grammars.matcher(request.grammar)

    def open(self, request: GenerationRequest, *, grammar: Matcher | None = None) -> TargetSession:
        """Queue a request for a slot.

        Args:
            request: the request.
            grammar: the request's grammar, compiled by `compiled`; None if the request has none.

        Raises:
            InvalidRequestError: the prompt does not fit the context or the vocabulary, or the decoder cannot do what
                is asked.
            CapacityError: slots and queue are full.
            UnavailableError: the engine is stopping.
        """
        check_prompt(request.prompt_token_ids, max_length=self.max_length, vocab_size=self.vocab_size)
        check_request(self._decoder, request)
        if (request.grammar is None) != (grammar is None):
            raise ValueError("the session of a request with a grammar needs the compiled one")
        if request.stop_at_eos:
            request = replace(request, stop_token_ids=request.stop_token_ids | self._limits.eos_token_ids)
        request = replace(request, sampling=replace(request.effective_sampling(), noise=self._limits.noise))
        limits = self._limits
        gamma, width = (request.gamma, request.gamma) if request.gamma is not None else (limits.gamma, limits.width)
        looking = Looking(limits.lookup, min(width, limits.width), self._answers)
        session = TargetSession(request, max_length=self.max_length, gamma=gamma, grammar=grammar, looking=looking)
        session.drafting = self.drafting
        self._enter(session)
        return session

    def propose(self, session: TargetSession, branches: Sequence[Branch]) -> None:
        """Add a draft worker's branches to the session's draft tree; see `TargetSession.propose`.

        Raises:
            InvalidRequestError: a branch is not valid, or a token id is outside the vocabulary.
        """
        for branch in branches:
            check_token_ids(branch.token_ids, vocab_size=self.vocab_size)
        session.propose(branches)
        self.wake()

    def begin_help(self, session: TargetSession, schedule: Schedule) -> None:
        """Begin to verify a draft worker's proposals for a session that has decoded without a worker until now."""
        session.follow(schedule)

    def end_help(self, session: TargetSession) -> None:
        """Stop verifying proposals: the session decodes without draft tokens again."""
        session.follow(None)
        self.wake()

    def close(self, session: TargetSession) -> None:
        """Free the session's slot, or remove it from the queue, and keep its answer for later lookups of draft tokens.

        A second call has no effect.
        """
        super().close(session)
        if not session.request.audits:
            self._answers.add(session.origin, session.token_ids[session.request.output_start :])

    async def answer(self, session: TargetSession) -> AsyncGenerator[TokenEvent, None]:
        """Yield the session's `Opened` event, then its commits of tokens; closing the generator closes the session."""
        try:
            while True:
                event = await session.commits.get()
                yield event
                if isinstance(event, Commit) and event.finish_reason is not None:
                    return
        finally:
            self.close(session)

    def _schedule(self, sessions: Sequence[TargetSession]) -> list[tuple[TargetSession, Turn]]:
        turns = self._batching.turns(sessions)
        if (seconds := self._batching.wait_s(turns, time.monotonic())) > 0:
            asyncio.get_running_loop().call_later(seconds, self.wake)
            return []
        if turns:
            self.drafting.begins(time.monotonic())
        return self._batching.narrowed(turns)

    def _passed(self, done: Sequence[tuple[TargetSession, Turn, _Timed]]) -> None:
        if not concern_drafting(session.gamma for session, _, _ in done):
            return
        verdicts = [verdict for _, _, (verdict, _, _) in done]
        decoding = [session for session, turn, _ in done if turn.num_unread == 1]
        members = {session for session, _, _ in done}
        num_waiting = sum(each.num_unread == 1 for each in self._admission.running if each not in members)
        passed = Pass(
            len(decoding) + num_waiting,
            sum(session.sources.num_plain for session in decoding),
            sum(verdict.num_draft_tokens for verdict in verdicts),
            sum(turn.num_unread for _, turn, _ in done if turn.num_unread > 1),
            any(verdict.of_draft[0] for verdict in verdicts),
        )
        num_verified = sum(verdict.own.num_lookup_tokens for verdict in verdicts)
        self.drafting.passed(passed, sum(session.num_found for session in decoding), num_verified)

    def _rest(self) -> None:
        if not self._sessions():
            self.drafting.idle()

    def _compute(self, work: list[Turn]) -> list[_Timed]:
        started = time.monotonic()
        verdicts = self._decoder.step(work)
        ended = time.monotonic()
        self._batching.record(work, verdicts, ended - started)
        return [(verdict, started, ended) for verdict in verdicts]

    def _can_replay(self, session: TargetSession) -> bool:
        return self.seed_invariant or session.request.sampling.greedy

    _step_name = "pass"

    def _describe(self, work: list[Turn], results: list[_Timed]) -> dict[str, Any]:
        verdicts = [verdict for verdict, _, _ in results]
        return {
            "sessions": len(work),
            "width": sum(_width(turn) for turn in work),
            "draft_tokens": sum(verdict.num_draft_tokens for verdict in verdicts),
            "accepted": sum(verdict.num_accepted_tokens for verdict in verdicts),
        }

    def _deliver(self, session: TargetSession, work: Turn, result: _Timed) -> None:
        verdict, started, ended = result
        if verdict.error is not None:
            session.fail(verdict.error)
            self.close(session)
            return
        if session.apply(work, verdict, started=started, ended=ended) is not None:
            self.close(session)
        if session.commits.num_bytes:
            self._limit_unread(session)

    def _limit_unread(self, session: TargetSession) -> None:
        """End the session if its answer has too many unread bytes; if all answers together have, end the largest one.

        The session ends with a CapacityError, and its unread events are dropped.
        """
        self._unread.add(session)
        limit = f"{UNREAD_BYTES_OF_CALL}"
        if session.commits.num_bytes <= UNREAD_BYTES_OF_CALL:
            if sum(each.commits.num_bytes for each in self._unread) <= UNREAD_BYTES:
                return
            limit = f"{UNREAD_BYTES} for all answers"
            session = max(self._unread, key=lambda each: each.commits.num_bytes)
        num_bytes = session.commits.num_bytes
        session.commits.drop()
        message = f"{num_bytes} bytes of the answer wait (limit {limit}): read faster"
        self._end(session, CapacityError(message, retry_after_s=1.0))


def _width(turn: Turn) -> int:
    return turn.num_unread + len(turn.proposal or turn.lookup)


def check_prompt(token_ids: Sequence[int], *, max_length: int, vocab_size: int) -> None:
    """Check that a prompt has fewer than `max_length` tokens, and only ids of the vocabulary.

    Raises:
        ContextLengthError: the prompt is too long.
        InvalidRequestError: an id is outside the vocabulary.
    """
    if len(token_ids) >= max_length:
        raise ContextLengthError(  # clients look for OpenAI's "maximum context length is" and for "prompt is too long"
            f"This model's maximum context length is {max_length} tokens, {max_length - 1} of them for the prompt "
            f"(sequence_length); the prompt is too long: it has {len(token_ids)}",
            field="prompt",
        )
    check_token_ids(token_ids, vocab_size=vocab_size)


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int) -> None:
    """Raise InvalidRequestError if any of `token_ids` is outside the vocabulary, that is not in 0..vocab_size - 1."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        outside = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise InvalidRequestError(f"token id {outside} is outside the vocabulary of {vocab_size}", field="prompt")
