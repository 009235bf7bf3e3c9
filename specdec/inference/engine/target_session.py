"""Session of one request at a target: its tokens, how many of them its slot has cached, draft tokens, and commits."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.inference.caller import caller, request_id
from specdec.inference.commit import Commit, FinishReason, Opened, Timings, TokenAudit, TokenEvent, TokenLogprobs
from specdec.inference.engine.drafting import Drafting
from specdec.inference.engine.prefixes import Prefix
from specdec.inference.model.decoder import Matcher, Turn, Verdict
from specdec.inference.request import MAX_GAMMA, GenerationRequest, Schedule
from specdec.inference.scheduling.prompt_parts import MAX_PART_TOKENS
from specdec.inference.speculation.answers import NO_ANSWERS, KeptAnswers, Origin
from specdec.inference.speculation.sources import Sources
from specdec.inference.speculation.tree import Branch
from specdec.inference.tokens import Tally, TokenView


class CommitQueue:
    """Queue of the events of one answer: the engine's loop puts them in, the task that answers the client takes them.

    Attributes:
        num_bytes: estimated memory of the unread events, in bytes; an event put into an empty queue counts as 0.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[TokenEvent | Exception, int]] = asyncio.Queue()
        self.num_bytes = 0

    def put(self, event: TokenEvent) -> None:
        """Add an event of the answer, after those that are in the queue."""
        num_bytes = 0 if self._queue.empty() else event.num_bytes
        self.num_bytes += num_bytes
        self._queue.put_nowait((event, num_bytes))

    def fail(self, error: Exception) -> None:
        """End the answer with an error, which `get` raises after the events before it."""
        self._queue.put_nowait((error, 0))

    def drop(self) -> None:
        """Discard the unread events."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.num_bytes = 0

    async def get(self) -> TokenEvent:
        """Wait for the next event, and return it.

        Raises:
            Exception: the error given to `fail`, after the events put before it.
        """
        item, num_bytes = await self._queue.get()
        self.num_bytes -= num_bytes
        if isinstance(item, Exception):
            raise item
        return item


class Clock:
    """Stopwatch of a session: how long it has waited and computed since its latest commit, in monotonic seconds."""

    def __init__(self) -> None:
        self.restart(time.monotonic())

    def restart(self, now: float) -> None:
        """Start measuring at `now`: the session is ready for its next pass."""
        self._ready_since = self._waiting_since = now
        self._compute_s = 0.0  # in passes since then

    def enter(self) -> None:
        """Record that the session has got a slot, from which its idle time counts."""
        self._waiting_since = time.monotonic()

    def computed(self, started: float, ended: float) -> None:
        """Record that a pass with this session ran from `started` to `ended`, in monotonic seconds."""
        self._compute_s += max(0.0, ended - max(started, self._ready_since))

    @property
    def ready_s(self) -> float:
        """Return the seconds since the session became ready for its next pass, with or without a slot."""
        return time.monotonic() - self._ready_since

    @property
    def idle_s(self) -> float:
        """Return the seconds since the session became ready, or since it took its slot if that was later."""
        return time.monotonic() - self._waiting_since

    def timings(self, ended: float, draft_us: int, step_us: int) -> Timings:
        """Return a commit's timings: the time in passes since the session became ready, and the rest as time in queue.

        Args:
            ended: end of the pass that gives the commit, in monotonic seconds.
            draft_us: microseconds that a draft model took in the engine's own step.
            step_us: microseconds of one step of the draft worker's model; 0 if unknown.
        """
        busy_us = _us(self._compute_s)
        queue_us = max(0, _us(ended - self._ready_since) - busy_us)
        return Timings(queue_us=queue_us, compute_us=busy_us - draft_us, draft_us=draft_us, step_us=step_us)


MAX_ADJUSTED_GAMMA = 16
"""Most draft tokens per pass of a request with penalties or logit biases, which make each one slower to verify."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Looking:
    """Texts in which a target looks up draft tokens by itself, besides the prediction of a request.

    Attributes:
        in_own_text: True if it looks in the request's own text too.
        width: most tokens of a proposal from the request's prediction, or from an earlier answer.
        answers: earlier answers that are kept.
    """

    in_own_text: bool = False
    width: int = 0
    answers: KeptAnswers = NO_ANSWERS


class TargetSession:
    """Session of one request at a target; only the engine's loop changes it.

    Attributes:
        id: name of the session in logs.
        request_id: id of the client's request in logs.
        request: the request.
        slot: slot that the session holds; None while it waits for one.
        commits: queue of the answer's events.
        token_ids: the prompt, then the committed output.
        num_cached_tokens: prompt tokens that the slot held when the session entered it.
        drafting: the engine's on-off switch of drafting; while it is off, passes verify no draft worker's tokens.
        schedule: SYNC: every pass waits for a proposal of the draft worker. ASYNC: a pass verifies the draft tokens
            that have arrived, or decodes if there are none. None: there is no draft worker.
        origin: caller, prompt and seed, by which the answer is kept for later requests.
        gamma: most draft tokens per pass, unless the schedule is SYNC: then the draft worker decides.
        sources: the session's draft tokens, and estimates of how many of them are accepted.
        num_found: number of tokens that prompt lookup found for the next pass.

    Args:
        request: the request, already validated against the engine's limits.
        max_length: most tokens of prompt and output together.
        gamma: most draft tokens per pass; with SYNC the draft worker decides, up to `MAX_GAMMA`.
        grammar: matcher of the request's grammar; None if it has none.
        looking: texts in which the target looks up draft tokens by itself.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        max_length: int,
        gamma: int,
        grammar: Matcher | None = None,
        looking: Looking = Looking(),
    ) -> None:
        self.id = f"s{next(_numbers)}"
        self.request_id = request_id()
        self.request = request
        self._grammar = grammar
        self.slot: int | None = None
        self.commits = CommitQueue()
        self.token_ids = list(request.prompt_token_ids)
        self._end = min(len(self.token_ids) + request.max_new_tokens, max_length)
        # In a slot: output_start <= len(prompt) <= _entered_at <= len(token_ids) <= _end; _num_cached < len(token_ids).
        # A stop token may cut a commit; then the session ends, and _num_cached counts accepted tokens after the cut.
        # _suspect_at <= len(token_ids): the session is a suspect while they are equal, up to its next commit.
        self._num_cached = 0  # first tokens that the slot holds
        self.num_cached_tokens = 0
        self._suspect_at: int | None = None  # number of tokens at the latest `replay`
        self._entered_at = 0  # number of tokens when it took its slot
        self.drafting = Drafting()
        self.schedule: Schedule | None = None
        prompt, owner = request.prompt_token_ids[: request.output_start], caller().owner(request.cache_salt)
        self.origin = Origin(owner, prompt, request.sampling.seed)
        lookup = looking.answers.lookup(self.origin, request.prediction, gamma if looking.in_own_text else 0)
        self._tally = Tally(request.output_start) if request.sampling.penalizes else None
        self.gamma, self._width = gamma, looking.width if gamma else 0
        self.sources = Sources(self.token_ids, lookup, self._width)
        self._was_asked = False  # for the target's own token, by an empty proposal
        self.num_found = 0  # tokens that lookup has found for the next pass
        self._num_helps = 0  # changes of the pool worker
        # Number of switches of drafting at the worker's latest proposal. No pass waits for the first one after a
        # switch, since the worker may have to read many sessions before it.
        self._heard_at = -1
        self._prompt_logprobs: list[TokenLogprobs] = []  # until the first commit
        self._audits: list[TokenAudit] = []  # likewise
        self._clock = Clock()

    def follow(self, schedule: Schedule | None) -> None:
        """Change to another draft worker, and drop the draft tokens of the one before.

        The new worker numbers its draft tokens from 0.

        Args:
            schedule: schedule by which the new worker drafts; None if the session has no worker from now on.
        """
        self._num_helps += 1
        is_new = self.request.schedule is None and self.drafting.num_switches > 0
        self._heard_at = -1 if is_new else self.drafting.num_switches
        self.schedule = schedule
        self.sources.follow()

    @property
    def help_id(self) -> str:
        """Return the name by which the present draft worker knows the session; each earlier worker had another one."""
        return f"{self.id}.{self._num_helps}"

    def enter(self, slot: int, num_cached_tokens: int = 0) -> None:
        """Take a slot, which has the session's first `num_cached_tokens` tokens already."""
        self.slot = slot
        self._num_cached = self.num_cached_tokens = num_cached_tokens
        self._clock.enter()
        self._entered_at = len(self.token_ids)

    def leave(self) -> None:
        self.slot = None

    @property
    def can_yield(self) -> bool:
        """Return whether tokens were committed since the session got its slot; then giving it up loses no work."""
        return len(self.token_ids) > self._entered_at

    @property
    def wanted(self) -> Prefix:
        """Return the prefix of which cached keys and values may be reused.

        It has all tokens before the first one whose logits are needed.
        """
        length = len(self.token_ids) - 1 if self.request.prompt_logprobs is None else 0
        if self.request.audits:
            length = min(length, self.request.output_start - 1)
        return Prefix(self.token_ids, length, self.request.cache_salt)

    @property
    def held(self) -> Prefix:
        """Return the prefix of the session's tokens whose keys and values are certainly in its slot."""
        return Prefix(self.token_ids, min(self._num_cached, len(self.token_ids)), self.request.cache_salt)

    def fail(self, error: Exception) -> None:
        self.commits.fail(error)

    def replay(self) -> None:
        """Let the next passes compute all of the session's tokens again after a failed step, and set `is_suspect`."""
        self._num_cached = self.num_cached_tokens = 0
        self._prompt_logprobs.clear()
        self._audits.clear()
        self._suspect_at = len(self.token_ids)

    @property
    def is_suspect(self) -> bool:
        """Return whether the session may have made a step fail: it has committed nothing since its last `replay`."""
        return self._suspect_at == len(self.token_ids)

    @property
    def idle_s(self) -> float:
        """Return for how many seconds the session has waited in its slot for a proposal; 0 if it waits for none."""
        return 0.0 if self.slot is None or self._ready else self._clock.idle_s

    @property
    def ready_s(self) -> float:
        """Return the seconds since the session became ready for its next pass."""
        return self._clock.ready_s

    @property
    def _ready(self) -> bool:
        return not self._waits_for_draft or self._was_asked or len(self.sources.tree) > 0

    @property
    def _widest(self) -> int:
        """Return how many draft tokens one pass may verify at most; further ones wait for later passes."""
        return self._adjusted(MAX_GAMMA if self._waits_for_draft else self.gamma)

    def _adjusted(self, widest: int) -> int:
        sampling = self.request.sampling
        return min(widest, MAX_ADJUSTED_GAMMA) if sampling.penalizes or sampling.logit_bias else widest

    @property
    def runs_ahead(self) -> bool:
        """Return whether the draft worker proposes without waiting for verdicts."""
        return self.schedule is not None and self.schedule.runs_ahead

    @property
    def _waits_for_draft(self) -> bool:
        waits = self.schedule is not None and self.schedule.target_waits and self.drafting.is_on
        return waits and self._heard_at == self.drafting.num_switches

    def propose(self, branches: Sequence[Branch]) -> None:
        """Add branches to the tree of draft tokens; with an empty list, the next pass decodes a token without a draft.

        Raises:
            InvalidRequestError: a branch has more tokens than the tree may have, or its parent never existed.
        """
        was_ready = self._ready
        self._heard_at = self.drafting.num_switches
        self._was_asked = self._was_asked or not branches
        self.sources.grow(branches)
        if self._ready and not was_ready:  # only a proposal that adds live tokens resets the idle timer
            self._clock.restart(self.sources.last_at)

    @property
    def num_unread(self) -> int:
        """Return how many of the session's tokens are not cached in its slot yet.

        That is 1 while it decodes, and more while it reads its prompt.
        """
        return len(self.token_ids) - self._num_cached

    def next_turn(self, part: int = MAX_PART_TOKENS) -> Turn | None:
        """Return what the next pass does for the session; None while the session waits for a draft worker's proposal.

        Args:
            part: most tokens of the prompt that the turn may read; a longer prompt takes several turns.
        """
        end = len(self.token_ids)
        if self.num_unread > part:
            return self._turn(self._num_cached + part, drafts=self.drafting.is_on, chooses=False)
        room = self._end - end - 1  # each pass adds one token of the target itself
        looks = self.drafting.lookups.are_due or self.sources.lookup.guides
        limit, width = min(self._widest, room), max(0, min(self._adjusted(self._width), room)) if looks else 0
        proposal = self.sources.tree.path(limit) if self.drafting.is_on else []
        preferred = self.sources.preferred(width, len(proposal) or (limit if self.drafting.is_on else 0))
        if self._ready or preferred:
            proposal = [] if preferred else proposal
            lookup = preferred or ([] if proposal else self.sources.replay.propose(width))
            self.num_found = len(lookup)
            drafts = self.drafting.is_on and not preferred
            return self._turn(end, proposal=proposal, lookup=lookup, gamma=limit, drafts=drafts)
        if self._num_cached < end - 1:
            return self._turn(end - 1, drafts=self.drafting.is_on, chooses=False)
        return None

    def _turn(self, end: int, **drafting: Any) -> Turn:
        if self.slot is None:
            raise RuntimeError(f"session {self.id} has no slot")
        request = self.request
        return Turn(
            slot=self.slot,
            start=self._num_cached,
            token_ids=TokenView(self.token_ids, end=end),
            sampling=request.sampling,
            output_start=request.output_start,
            logprobs=request.logprobs,
            scored=self._scored(end),
            prompt_logprobs=request.prompt_logprobs or 0,
            audits=request.audits,
            grammar=self._grammar,
            tally=self._tally,
            **drafting,
        )

    def _scored(self, end: int) -> Sequence[int]:
        """Return the prompt's tokens that a pass over the positions up to `end` scores, if the request asks for scores.

        A score is the token's log-probability, or in an audit a comparison with the token that the target would choose.
        Each row of logits scores the token after it. After the first commit the result is empty, since a prompt that
        is read again, as after a failed step, is not scored again.
        """
        request, length = self.request, len(self.request.prompt_token_ids)
        if (request.prompt_logprobs is None and not request.audits) or len(self.token_ids) > length:
            return ()
        return self.token_ids[self._num_cached + 1 : min(end + 1, length if request.audits else request.output_start)]

    def apply(self, turn: Turn, verdict: Verdict, *, started: float, ended: float) -> FinishReason | None:
        """Apply the result of a pass to the session, and queue the commit of its tokens for the reader.

        Args:
            turn: what the pass did for this session.
            verdict: the result of the pass for this session.
            started, ended: start and end of the pass, in monotonic seconds.

        Returns:
            Why the session ends with this commit; None if it goes on.
        """
        self._num_cached = len(turn.token_ids) + verdict.num_accepted_tokens
        self._clock.computed(started, ended)
        self._prompt_logprobs.extend(verdict.prompt_logprobs)
        self._audits.extend(verdict.audits)
        if not turn.chooses:
            self.sources.lookup.read(self.token_ids, len(self.token_ids))
            return None
        position = len(self.token_ids)
        token_ids, reason = self._cut(verdict.token_ids)
        self.token_ids.extend(token_ids)
        self.sources.tree.commit(token_ids)
        self._was_asked = False
        share, has_grammar = self.drafting.lookups.share, self._grammar is not None
        is_predicted = verdict.own.num_lookup_tokens > 0 and self.sources.lookup.is_prediction
        self.sources.record(verdict, ended, lookup_share=share, has_grammar=has_grammar)
        num_accepted = min(verdict.num_accepted_tokens, len(token_ids))
        num_drafted, own = verdict.num_draft_tokens, verdict.own
        own = replace(own, is_predicted=True) if is_predicted else own
        rejected = verdict.rejected_token_ids if self.request.include_rejected else ()
        if len(token_ids) < len(verdict.token_ids):
            # Draft tokens after a stop token count as neither accepted nor rejected.
            num_drafted, own = len(token_ids), own.cut(len(token_ids), verdict.num_accepted_tokens)
            rejected = ()
        timings = self._clock.timings(ended, verdict.draft_us, self.sources.step_us)
        logprobs = verdict.logprobs[: len(token_ids)]
        num_received, hold_us = self.sources.acknowledged(ended)
        commit = Commit(
            position,
            token_ids,
            num_drafted,
            num_accepted,
            timings,
            reason,
            logprobs,
            own=own,
            rejected_token_ids=rejected,
            num_received_tokens=num_received,
            hold_us=hold_us,
            is_held=not self.drafting.is_on and self.gamma > 0,
        )
        if position == len(self.request.prompt_token_ids):
            self.commits.put(Opened(self.num_cached_tokens, tuple(self._prompt_logprobs), tuple(self._audits)))
            self._prompt_logprobs.clear()
            self._audits.clear()
        self.commits.put(commit)
        self._clock.restart(ended)
        return reason

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Return the tokens up to the end of the output, and the finish reason; None if the output goes on."""
        room = self._end - len(self.token_ids)
        for i, token_id in enumerate(token_ids[:room]):
            if token_id in self.request.stop_token_ids:
                return token_ids[: i + 1], FinishReason.STOP
        if len(token_ids) >= room:
            return token_ids[:room], FinishReason.LENGTH
        return token_ids, None


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
