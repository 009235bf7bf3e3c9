"""Choice of each target pass: its sessions, its wait for draft tokens, and how many draft tokens it verifies.

The choice depends on the times of earlier passes, which are recorded here. The module knows neither the decoder, nor
slots, nor the event loop, and reads no clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from specdec.inference.engine.target_session import TargetSession
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.model.slots import Windows
from specdec.inference.request import Schedule
from specdec.inference.scheduling.pass_times import PassTimes
from specdec.inference.scheduling.prompt_parts import MAX_PART_TOKENS, PromptParts
from specdec.inference.scheduling.waiting import schedule_for
from specdec.inference.scheduling.widths import choose_widths

Turns: TypeAlias = Sequence[tuple[TargetSession, Turn]]


class Batching:
    """Choice of each pass of a target's engine, by the measured times of earlier passes.

    Args:
        prompt_share: longest time that reading prompts may add to a pass, as a multiple of the pass without prompts.
        chunk_tokens: number of tokens of the parts in which the decoder reads long prompts; 0 if it takes any number.
        windows: windows, equally long runs of positions, which the backend always computes whole; None if it computes
            only the positions of the pass.
    """

    def __init__(self, prompt_share: float, chunk_tokens: int, windows: Windows | None = None) -> None:
        self._chunk_tokens, self._windows = chunk_tokens, windows
        self._passes = PassTimes()
        self._steps = PassTimes()  # whole steps without prompts, drafting and draft tokens included
        self._parts = PromptParts(prompt_share)

    @property
    def pass_s(self) -> float:
        """Return the recent median time of a pass over one session, in seconds.

        It is the time without draft tokens if such passes were measured, else the time with them.
        """
        return self._passes.of(1).seconds(0)

    def schedule(self, num_sessions: int) -> Schedule:
        """Return the drafting schedule that gives most tokens per second while `num_sessions` share the passes.

        It says whether each pass waits for draft tokens (synchronous), or decodes without them if none have arrived.
        """
        return schedule_for(self.pass_s, self._passes.of(num_sessions).seconds(0))

    def turns(self, sessions: Sequence[TargetSession]) -> list[tuple[TargetSession, Turn]]:
        """Return the sessions that take part in the next pass, each with its turn: what the pass does for it.

        The number of prompt tokens that one pass may read is shared by the sessions that still read their prompts: the
        oldest session takes its part first. A session that waits for draft tokens takes no part.
        """
        longest, room = self._chunk_tokens or MAX_PART_TOKENS, self._room(sessions)
        turns = []
        for session in sessions:
            is_reading = session.num_unread > 1
            part = min(longest, room) if is_reading else longest
            if part and (turn := session.next_turn(part)) is not None:
                turns.append((session, turn))
                room -= turn.num_unread if is_reading else 0
        return turns

    def _room(self, sessions: Sequence[TargetSession]) -> int:
        """Return how many prompt tokens the next pass over `sessions` may read, of all their prompts together.

        There is no limit if every session is still reading its prompt, or if the decoder reads prompts in parts of a
        fixed length: then each pass reads one part of each prompt.
        """
        num_decoding = sum(session.num_unread == 1 for session in sessions)
        if not num_decoding or self._chunk_tokens:
            return sys.maxsize
        return self._parts.room(self._steps.of(num_decoding).seconds(0))

    def wait_s(self, turns: Turns, now: float) -> float:
        """Return for how many more seconds the pass should wait for draft tokens; 0 or less: it should begin now.

        Args:
            turns: sessions of the pass, each with what the pass does for it.
            now: the present time, in monotonic seconds.
        """
        if not turns or any(not _could_wait(session, turn) for session, turn in turns):
            return 0.0  # the pass runs anyway, so the others join it
        costs = self._passes.of(1)
        return min(session.sources.wait_s(costs, now=now, ready_s=session.ready_s) for session, _ in turns)

    def narrowed(self, turns: Turns) -> list[tuple[TargetSession, Turn]]:
        """Return the turns of a pass, each with its proposal cut to the number of draft tokens worth verifying.

        The numbers are chosen to give most tokens per second, by the measured times of passes. Proposals of synchronous
        rounds are not cut.
        """
        turns = turns if self._windows is None else list(_within(self._windows, turns))
        free = [(session, turn) for session, turn in turns if session.runs_ahead or turn.lookup]
        available = [len(turn.proposal or turn.lookup) for _, turn in free]
        rates = [session.sources.rate(turn) for session, turn in free]
        widths = choose_widths(available, rates, self._passes.of(len(turns)).seconds)
        cut = {session: _cut(turn, width) for (session, turn), width in zip(free, widths, strict=True)}
        return [(session, cut.get(session, turn)) for session, turn in turns]

    def record(self, work: Sequence[Turn], verdicts: Sequence[Verdict], seconds: float) -> None:
        """Record the time of a pass, in seconds, for the choice of later ones.

        The time of a pass that read no prompt shows the cost of its draft tokens. A pass that also read prompts shows
        the cost of the prompts, by its difference to a measured pass over as many sessions and draft tokens without
        prompts; if there is no such pass, the cost of the prompts is not recorded.

        Args:
            work: turns of the pass, one per session.
            verdicts: their results.
            seconds: time of the pass, with the drafting by a draft model in the same process.
        """
        num_draft_tokens = sum(verdict.num_draft_tokens for verdict in verdicts)
        unread = [turn.num_unread for turn in work if turn.num_unread > 1]
        num_decoding = len(work) - len(unread)
        draft_s = max((verdict.draft_us for verdict in verdicts), default=0) / 1e6
        if not unread:
            self._passes.record(num_decoding, num_draft_tokens, seconds - draft_s)
        if num_decoding:
            self._steps.record(num_decoding, 0, max(0.0, seconds - self._parts.seconds(sum(unread))))
        if not unread:
            return
        if not num_decoding:
            self._parts.record(sum(unread), seconds)
        elif (pass_s := self._passes.measured(num_decoding, num_draft_tokens)) is not None:
            self._parts.record(sum(unread), seconds - draft_s - pass_s)


def _could_wait(session: TargetSession, turn: Turn) -> bool:
    waits = session.runs_ahead and session.drafting.is_on and turn.drafts
    return waits and turn.chooses and not turn.proposal and turn.gamma > 0


def _within(windows: Windows, turns: Turns) -> Iterator[tuple[TargetSession, Turn]]:
    """Yield the turns, each with its proposal cut to the positions that the pass computes anyway.

    The backend always computes whole windows, runs of positions of a fixed length, so that the rest of a window is
    free. Proposals of synchronous rounds are not cut.
    """
    num_spare = -sum(windows.count(turn.start, len(turn.token_ids)) for _, turn in turns) % windows.num
    for session, turn in turns:
        end, length = len(turn.token_ids), len(turn.proposal or turn.lookup) or turn.gamma
        if session.runs_ahead or not turn.proposal:  # a round is verified whole
            room = -end % windows.width + num_spare * windows.width
            length = min(length, room)
            turn = replace(_cut(turn, length), gamma=min(turn.gamma, room))
        num_spare = max(0, num_spare + 1 - windows.count(end - 1, end + length))
        yield session, turn


def _cut(turn: Turn, width: int) -> Turn:
    if len(turn.proposal or turn.lookup) == width:
        return turn
    return replace(turn, proposal=turn.proposal[:width], lookup=turn.lookup[:width])
