"""Request at an engine that is vLLM: its tokens, what its draft worker has sent, and the reports of its passes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.inference.caller import request_id
from specdec.inference.commit import (
    NO_OWN_DRAFTS,
    Commit,
    FinishReason,
    OwnDrafts,
    Timings,
    TokenLogprobs,
)
from specdec.inference.config import ALWAYS
from specdec.inference.engine.contract import DecodesAlone
from specdec.inference.engine.drafting import Drafting, concern_drafting
from specdec.inference.engine.target import check_token_ids
from specdec.inference.errors import InternalError, InvalidRequestError
from specdec.inference.model.decoder import Matcher
from specdec.inference.observe.timeline import Timeline
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.scheduling.pass_times import PassTimes
from specdec.inference.scheduling.quiet import Pass
from specdec.inference.speculation.tree import MAX_NUMBERS, Branch
from specdec.inference.vllm.frames import FrameError, Grow, Help, Hold, Passed, Row, ToCore
from specdec.inference.vllm.mailbox import Mailbox
from specdec.inference.vllm.translation import REASONS, scores

_numbers = itertools.count(1)


class VllmSession:
    """State of one request at an engine over vLLM.

    Attributes:
        id: name of the request in messages to and from its engine core.
        core: number of the link to its engine core; None until the core has announced the request.
        drafting: switch of drafting, which the engine sets.
        grammar: matcher of the request's grammar; None if it has none.
        token_ids: prompt, and the output tokens that were committed.
        rows: reports of passes whose tokens are not committed yet, each with the microseconds of its pass.
        reported: event that is set when a report has come, or when the core is lost.
        error: error with which the answer is to end; None while it goes on.
        reading: task that waits for vLLM's next output; None while no task does.
        early: messages for the core, kept until it has announced the request.
    """

    runs_ahead, idle_s = True, 0.0  # a pass of vLLM never waits for one request: rounds are served as run-ahead

    def __init__(self, request: GenerationRequest, grammar: Matcher | None = None) -> None:
        self.id = f"s{next(_numbers)}"
        self.request_id = request_id()
        self.request, self.gamma = request, request.gamma
        self.grammar = grammar
        self.token_ids = list(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.core: int | None = None
        self.drafting = Drafting()
        self.error: Exception | None = None
        self.reading: asyncio.Task[Any] | None = None
        self.rows: deque[tuple[Row, int]] = deque()
        self.reported = asyncio.Event()
        self._num_helps = 0
        self._num_numbers = 0  # draft tokens that the present draft worker has sent
        self.early: list[ToCore] = []

    @property
    def help_id(self) -> str:
        """Return the session's name at its present draft worker; `begin_help` and `end_help` change it."""
        return f"{self.id}.{self._num_helps}"

    def fail(self, error: Exception) -> None:
        """End the session's answer with an error, once the events before it have been read."""
        self.error = error
        if self.reading is not None:
            self.reading.cancel()

    def follow(self, *, is_helped: bool) -> Help:
        """Begin the use of a new draft worker's tokens if `is_helped`, else end it.

        Returns:
            The message that tells the engine core.
        """
        self._num_helps += 1
        self._num_numbers = 0
        self.early.clear()
        return Help(self.id, self._num_helps if is_helped else None)

    def propose(self, branches: Sequence[Branch]) -> Grow:
        """Check a draft worker's branches; return the message that sends them to the engine core.

        Raises:
            InvalidRequestError: a branch is not valid, or more draft tokens have come than are kept for a request that
                has not arrived at its engine core.
        """
        for branch in branches:
            branch.check(num_committed=len(self.token_ids), num_numbers=self._num_numbers)
            self._num_numbers += len(branch.token_ids)
        if self.core is None and self._num_numbers > MAX_NUMBERS:
            raise InvalidRequestError(f"more than {MAX_NUMBERS} draft tokens came before the request's first pass")
        return Grow(self.id, list(branches))

    @property
    def num_reported(self) -> int:
        """Return the number of the session's tokens, including tokens of passes that have only been reported."""
        return len(self.token_ids) + sum(row.num_tokens for row, _ in self.rows)

    def report(self, row: Row, us: int) -> None:
        """Keep an engine core's report of a pass, which took `us` microseconds, for the commit of its tokens.

        A report on tokens that the session has already is ignored: a core that dials again announces a request with all
        of its tokens, and may report the latest of them once more.

        Raises:
            FrameError: tokens between the session's and the report's are missing, or the report has a wrong number.
        """
        if row.position < self.num_reported:
            return
        if row.position > self.num_reported or (row.token_ids and len(row.token_ids) != row.num_tokens):
            raise FrameError(f"request {row.name} lacks tokens before {row.position + row.num_tokens}")
        self.rows.append((row, us))
        self.reported.set()

    def commits(self, part: Any) -> Iterator[Commit]:
        """Yield the commits of one of vLLM's outputs, one per pass; vLLM joins passes that a slow reader has not read.

        Args:
            part: vLLM's `CompletionOutput`, with the tokens since the one before.

        Raises:
            InvalidRequestError: the grammar became too complex.
        """
        count, token_ids = self.request.logprobs, tuple(part.token_ids)
        logprobs = []
        if count is not None:
            logprobs = [scores(token_id, each, count) for token_id, each in zip(token_ids, part.logprobs, strict=True)]
        end = REASONS[part.finish_reason] if part.finish_reason else None
        if end is FinishReason.STOP and self.grammar is not None:  # the end of a mask, or for want of one
            try:
                self.grammar.masks([*self.token_ids, *token_ids][self.request.output_start : -1], ())
            except InternalError as exc:  # vLLM's own matcher gave up, and then had no masks
                raise InvalidRequestError(f"grammar: it became too complex ({exc})", field="grammar") from exc
        while token_ids or end is not None:
            size = self.rows[0][0].num_tokens if self.rows else len(token_ids)
            reason = end if size >= len(token_ids) else None
            yield self.commit(token_ids[:size], logprobs[:size], reason)
            if reason is not None:
                return
            token_ids, logprobs = token_ids[size:], logprobs[size:]

    def commit(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], reason: FinishReason | None
    ) -> Commit:
        """Append the next tokens; return their commit, with the counts of their pass if it has been reported.

        Args:
            token_ids: the tokens of one pass.
            logprobs: log-probabilities of each token; empty if the request asks for none.
            reason: why the output ends with these tokens; None if it goes on.
        """
        position = len(self.token_ids)
        row, us = self.rows.popleft() if self.rows else (Row(self.id, position, len(token_ids)), 0)
        self.token_ids.extend(token_ids)
        is_new = row.help == self._num_helps
        return Commit(
            position,
            tuple(token_ids),
            row.num_drafts,
            row.num_accepted,
            Timings(compute_us=us),
            reason,
            tuple(logprobs),
            is_held=not self.drafting.is_on and self.gamma != 0,
            num_received_tokens=row.num_received if is_new else 0,
            hold_us=row.hold_us if is_new else 0,
            own=OwnDrafts(row.num_drafts, row.num_accepted, is_predicted=row.is_predicted)
            if row.is_lookup
            else NO_OWN_DRAFTS,
            rejected_token_ids=tuple(row.rejected) if self.request.include_rejected else (),
        )


@dataclass(slots=True)
class _CoreState:
    """What is known of an engine core of vLLM from its latest report on a pass.

    Attributes:
        num_running: number of requests that held memory in the core.
        was_quiet: whether no draft worker computed when the report came.
        is_held: whether the core was told to verify no tokens of draft workers.
    """

    num_running: int = 0
    was_quiet: bool = False
    is_held: bool = False


class Sessions(DecodesAlone):
    """Base of an engine over vLLM: its sessions, and the sending of draft tokens to vLLM's cores by the mailbox.

    Args:
        mailbox: mailbox that the cores dial.
        drafting: when draft workers may compute, see `Drafting`.
    """

    vocab_size: int
    seed_invariant = True
    schedule = Schedule.ASYNC  # rounds are not known to the core

    def __init__(self, mailbox: Mailbox, drafting: str = ALWAYS) -> None:
        self._mailbox = mailbox
        self._sessions: dict[str, VllmSession] = {}
        self._times = PassTimes()
        self.drafting = Drafting(drafting)
        self._cores: dict[int, _CoreState] = {}
        self.timeline: Timeline | None = None

    @property
    def pass_us(self) -> int:
        """Return the recent time of a pass over one session without draft tokens, in microseconds; 0 while unknown."""
        return round(self._times.of(1).seconds(0) * 1e6)

    def close(self, session: VllmSession) -> None:
        """Remove the session, so that it gets no more reports; a second call has no effect."""
        self._sessions.pop(session.id, None)

    def _take(self, core: int, passed: Passed) -> int:
        """Apply the report of a pass; return the number of its draft tokens.

        Raises:
            FrameError: see `VllmSession.report`.
        """
        num_drafts = sum(row.num_drafts for row in passed.rows)
        if not passed.num_prompt_tokens:
            self._times.record(len(passed.rows), num_drafts, passed.us / 1e6)
        state = self._cores.setdefault(core, _CoreState())
        was_quiet, state.was_quiet = state.was_quiet, self.drafting.is_quiet
        state.num_running = passed.num_running
        sessions = [self._sessions[row.name] for row in passed.rows if row.name in self._sessions]
        if passed.period_us and concern_drafting(each.gamma for each in sessions):
            each = self._pass_of(core, passed, num_drafts)
            self.drafting.measured(each, is_quiet=was_quiet and state.was_quiet, now=time.monotonic())
        if state.is_held == self.drafting.is_on:
            state.is_held = not state.is_held
            self._mailbox.send(core, Hold(state.is_held))
        for row in passed.rows:
            if (session := self._sessions.get(row.name)) is not None:
                session.report(row, passed.us)
        return num_drafts

    def _pass_of(self, core: int, passed: Passed, num_drafts: int) -> Pass:
        """Return what a pass of one core did, with counts extended to the sessions of all cores.

        Drafting is on or off for all cores together, so the pass counts as if the others had done the same.
        """
        num_elsewhere = sum(state.num_running for other, state in self._cores.items() if other != core)
        num_plain = sum(row.num_plain for row in passed.rows) * (1 + num_elsewhere / len(passed.rows))
        has_drafts = any(row.num_drafts and not row.is_lookup for row in passed.rows)
        counts = len(passed.rows) + num_elsewhere, num_plain, num_drafts, passed.num_prompt_tokens
        return Pass(*counts, has_drafts, passed.period_us / 1e6)

    def propose(self, session: VllmSession, branches: Sequence[Branch]) -> None:
        """Send branches to the session's draft tree in vLLM's core.

        Raises:
            InvalidRequestError: a branch is too long, its parent never existed, or a token id is unknown.
        """
        for branch in branches:
            check_token_ids(branch.token_ids, vocab_size=self.vocab_size)
        if branches:
            self._send(session, session.propose(branches))

    def begin_help(self, session: VllmSession, schedule: Schedule) -> None:
        """Begin to verify the proposals of a draft worker for this session."""
        self._send(session, session.follow(is_helped=True))

    def end_help(self, session: VllmSession) -> None:
        """Stop verifying proposals: the session decodes without draft tokens again."""
        self._send(session, session.follow(is_helped=False))

    def _send(self, session: VllmSession, frame: ToCore) -> None:
        if session.core is None:
            session.early.append(frame)
        else:
            self._mailbox.send(session.core, frame)
