"""Decision whether drafting may go on, by what the same tokens would have cost without drafts.

Passes during which no draft worker computes, quiet passes (see quiet.py), are measured next to passes with drafts. They
show what would have been without drafting, the counterfactual:

    gain = seconds that decoding without a draft model, but with prompt lookup, would have taken for what was committed
           / seconds taken

A gain below 1 means that drafting costs speed, whatever the cause. While drafting is on, it stops for a few passes now
and then, a quiet probe, to see what passes cost without it. While it is off, it goes on for a few passes now and then,
a try, to see whether it would pay. All times are in seconds. The caller has the clock.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specdec.inference.scheduling.quiet import NUM_QUIET, Pass, Quiet

MIN_TRY, MAX_TRY = 4, 16
"""Fewest and most passes with drafts in a try, which shows whether drafting, now off, would pay.

A large loss ends the try sooner.
"""
RECENT = 48
"""Number of the latest passes with drafts that are kept, to compare their speed with that of passes without drafts."""
FIRST_CHECK = 12
"""Number of passes with drafts before their speed is first compared with that of passes without drafts."""
MAX_CATCH_UP = 12
"""Most passes without a draft token, after drafting is switched on, that are not counted as passes with drafts."""
HOLD_PASSES, LEAVE_PASSES = 8, 1
"""Passes in a row with about equally many sessions, after which the decision for so many sessions takes effect.

HOLD_PASSES is for turning drafting on, LEAVE_PASSES for turning it off.
"""
MARGIN = 0.01
"""Least difference from 1 of a gain, the speed with drafts over the speed without, that changes a decision."""
TRY_BUDGET = 0.015
"""Largest share of the time of all passes that may be lost by trying drafting again where it did not pay before."""
CREDIT_S = 5.0
"""Seconds that are added to the time of all passes for `TRY_BUDGET`, so that the first tries need not wait."""
QUIET_SHARE = 0.02
"""Share of the time that quiet probes, a few passes without drafts to compare with, may take while drafting pays."""
FIRST_INTERVAL_S, MAX_INTERVAL_S = 1.0, 64.0
"""Least seconds between two probes without drafts, or between two tries of drafting, at first and in the end."""
SETTLE_S = 2.0
"""Longest wait for the draft workers to stop, in seconds; while one goes on, no pass without drafting is measured."""
_STALE = 0.85
"""Passes without drafting are measured again once passes with drafts take less than this share of their former time.

Both times are relative to passes without drafting.
"""
_NOISE = 0.05
"""Least standard deviation that the time of a pass is assumed to have, as a share of that time."""
_OUTLIER = 6.0
"""Limit of the time with which a pass counts, as a multiple of the median: something else delays a pass above it."""


@dataclass(frozen=True, slots=True)
class Change:
    """Change of the decision whether drafting is on, with the figures that led to it.

    Attributes:
        is_on: True if drafting is on from now on.
        num_sessions: number of sessions that the decision is for, rounded to a power of two.
        gain: speed with drafts over speed without, by which it was decided.
        quiet_s: seconds that a pass over so many sessions takes without drafting; 0 if they are not known.
    """

    is_on: bool
    num_sessions: int
    gain: float
    quiet_s: float


class _Probe(enum.Enum):
    QUIET = enum.auto()
    """Drafting pays, and stops for a few passes to see whether it still does."""
    TRY = enum.auto()
    """Drafting does not pay, and goes on for a few passes to see whether it would."""


@dataclass(slots=True)
class _Decision:
    """Decision whether drafting is on, for all numbers of sessions that round to the same power of two.

    Attributes:
        is_on: whether drafting may go on.
        gain: latest result: speed with drafts over speed without.
        due: earliest time of the next try (a few passes with drafts), while drafting is off.
        lost_s: seconds that the latest try has cost; the next one is assumed to cost as many.
        interval_s: shortest time to the next try, in seconds. It grows by half with each try that finds a loss again.
        is_tested: whether the decision rests on passes over so many sessions, not over a number near to it.
        recent: latest passes with drafts.
    """

    is_on: bool
    gain: float = 1.0
    due: float = 0.0
    lost_s: float = 0.0
    interval_s: float = 0.0
    is_tested: bool = False
    recent: deque[Pass] = field(default_factory=lambda: deque(maxlen=RECENT))


class Counterfactual:
    """Decision whether draft workers may compute, by the measured passes that its caller records.

    Now and then it is reversed for a few passes, a probe, to compare the speeds with and without drafts.

    Args:
        is_on: the decision until something is measured.

    Attributes:
        is_on: whether draft workers may compute now: the decision, or its opposite in a probe.
        begins_on: the decision for a number of sessions while nothing is measured for similar numbers.
        quiet: measured times of quiet passes, during which no draft worker computed.
        lost_s: seconds that drafting has cost, in tries and in passes before it was found to be slower.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on, self.lost_s = is_on, 0.0
        self.begins_on = is_on
        self.quiet = Quiet()
        self._decisions: dict[int, _Decision] = {}
        self._octave, self._num_here = -1, 0
        self._probe: _Probe | None = None
        self._probed = _Decision(is_on)  # the decision that the probe is for
        self._busy_s = 0.0
        self._began, self._num_probed = 0.0, 0
        self._tried: list[Pass] = []
        self._since, self._num_since, self._has_drafts = 0.0, 0, False
        self._settle_s = self._arrival_s = 0.0  # from a switch to the last draft step, and to the first draft token
        self._loss_s: float | None = None  # of the try that ends, or of a probe, until no worker computes
        self._quiet_due = 0.0
        self._usual: float | None = None  # ratio of passes with drafts to quiet ones, soon after a probe
        self._quiet_interval_s = FIRST_INTERVAL_S
        self._seen: set[tuple[int, int]] = set()

    @property
    def has_decided(self) -> bool:
        """Return whether a pass has been recorded."""
        return bool(self._decisions)

    def figures(self) -> list[tuple[int, float, float | None]]:
        """Return what is measured, by number of sessions rounded to a power of two.

        Each is (number of sessions, latest gain, seconds of a pass without drafts). The gain is the speed with drafts
        over the speed without. The last is None while unknown.
        """
        return [(2**octave, each.gain, self.quiet.period(2**octave)) for octave, each in self._decisions.items()]

    def passed(self, each: Pass, *, is_quiet: bool, now: float) -> Change | None:
        """Record a pass that ended at `now`, and decide anew whether drafting is on.

        Args:
            each: the pass; at least one session decoded in it.
            is_quiet: True if no draft worker computed during the pass.
            now: the present time in seconds, of any clock that only goes forward.

        Returns:
            The change of a decision; None if none has changed.
        """
        decision = self._here(each.num_sessions)
        before = decision, decision.is_on, self._probed, self._probed.is_on
        self._busy_s += each.seconds
        if is_quiet and self.is_on:  # there is no worker
            if not self._is_first(each):
                self.quiet.record(each)
            return None
        if is_quiet:
            self._take_quiet(each, now)
        else:
            self._take(each, decision, now)
        self._begin_probe(each, decision, now)
        is_on = decision.is_on if self._probe is None else self._probe is _Probe.TRY
        is_decided = self._probe is not None or self._probed.is_on == is_on
        if is_on != self.is_on and (is_decided or self._num_here >= (HOLD_PASSES if is_on else LEAVE_PASSES)):
            self._switch(is_on, now)
        return self._change(before[:2]) or self._change(before[2:])

    def _change(self, before: tuple[_Decision, bool]) -> Change | None:
        decision, was_on = before
        if decision.is_on == was_on:
            return None
        octave = next((octave for octave, each in self._decisions.items() if each is decision), 0)
        return Change(decision.is_on, 2**octave, decision.gain, self.quiet.period(2**octave) or 0.0)

    def _here(self, num_sessions: int) -> _Decision:
        """Return the decision for a number of sessions, and make it if there is none yet.

        A new decision follows that of the nearest tested number; if this number is far, it begins with drafting off.
        """
        octave = round(math.log2(num_sessions))
        self._num_here = self._num_here + 1 if octave == self._octave else 0
        self._octave = octave
        if octave not in self._decisions:
            tested = [key for key, each in self._decisions.items() if each.is_tested]
            near = min(tested, key=lambda key: abs(key - octave), default=octave)
            known = self._decisions.get(near, _Decision(self.begins_on))
            is_near = abs(near - octave) <= 1  # else it begins with quiet passes, which cost nothing, and a try
            self._decisions[octave] = _Decision(known.is_on and is_near, known.gain, known.due * is_near, known.lost_s)
        return self._decisions[octave]

    def _is_first(self, each: Pass) -> bool:
        """Return whether `each` is the first pass with about so many sessions and draft tokens.

        Such a pass takes longer, because backends compile in it.
        """
        shape = self._octave, each.num_draft_tokens.bit_length()
        is_first = shape not in self._seen
        self._seen.add(shape)
        return is_first

    def _take(self, each: Pass, decision: _Decision, now: float) -> None:
        """Record a pass during which draft workers computed.

        If the passes show enough, a try of drafting ends, or a probe without drafting becomes due.
        """
        plain_s = self.quiet.plain_s(each)
        if self._loss_s is not None and plain_s is not None:
            self._loss_s += each.seconds - plain_s
        if not self.is_on:
            if now - self._since > SETTLE_S and self._probe is _Probe.QUIET:
                self._end_quiet(now)
            return
        self._num_since += 1
        if not self._has_drafts:  # workers read the sessions' tokens first, all at once
            late = self._num_since > MAX_CATCH_UP and now - self._since > 2 * self._settle_s
            self._has_drafts = each.has_drafts or late
            self._arrival_s = now - self._since
        elif not self._is_first(each):
            self._take_drafted(each, decision, now)

    def _take_drafted(self, each: Pass, decision: _Decision, now: float) -> None:
        decision.recent.append(each)
        if self._probe is _Probe.TRY:
            self._tried.append(each)
            gain, error = self._gain(self._tried)
            num_errors = 1 if len(self._tried) >= MIN_TRY else 3  # a large loss is clear sooner
            is_loss = gain + num_errors * error < 1 and len(self._tried) > 1
            is_gain = gain - 2 * error > 1 + MARGIN and self._lasts(self._tried, MIN_TRY, 1)
            if is_loss or is_gain or self._lasts(self._tried, MAX_TRY, 3):
                self._probe = None
                self._decide(self._probed, gain, gain > 1 + MARGIN, now)
        elif self._probe is None and self._lasts(decision.recent, FIRST_CHECK, 3) and self._num_since % 4 == 0:
            is_doubtful = self._is_losing(decision) or self._is_stale(self._latest(decision))
            self._quiet_due = now if is_doubtful else self._quiet_due  # fresh quiet passes decide

    def _is_losing(self, decision: _Decision) -> bool:
        """Return whether drafting is slower for certain in the latest passes, or probably in all recent ones.

        The gain in all recent ones becomes `decision.gain`.
        """
        decision.gain, error = self._gain(decision.recent)
        if len(decision.recent) >= RECENT and decision.gain + error < 1 - MARGIN:
            return True
        gain, error = self._gain(self._latest(decision))
        return gain + 2 * error < 1 - MARGIN

    def _latest(self, decision: _Decision) -> list[Pass]:
        """Return the latest passes with drafts, the latest first: as many as are enough to decide by."""
        latest: list[Pass] = []
        for each in reversed(decision.recent):
            latest.append(each)
            if self._lasts(latest, MAX_TRY, 3):
                break
        return latest

    def _lasts(self, passes: Collection[Pass], number: int, num_arrivals: int) -> bool:
        """Return whether `passes`, all of them with drafts, are enough to show whether drafts save time.

        They are if there are `number` of them, and if they last for `num_arrivals` times the time from a switch to the
        first draft token: over a slow link, drafts need that long to take effect.
        """
        return len(passes) >= number and sum(each.seconds for each in passes) >= num_arrivals * self._arrival_s

    def _take_quiet(self, each: Pass, now: float) -> None:
        """Record a pass during which no draft worker computed; end a probe without drafts after enough of them."""
        if not self._num_since:  # the first one since the switch
            self._settle_s = now - each.seconds - self._since
            self._settle()
        self._num_since += 1
        if self._is_first(each):
            return
        self.quiet.record(each)
        self._num_probed += not each.num_prompt_tokens
        if self._probe is _Probe.QUIET and self._num_probed >= NUM_QUIET:
            self._end_quiet(now)

    def _begin_probe(self, each: Pass, decision: _Decision, now: float) -> None:
        """Begin a probe, a few passes without drafts while drafting is on or with drafts while it is off, if it is due.

        A probe with drafts, a try, also needs room in the budget for the time that it may lose.
        """
        if self._probe is not None or self._num_here < HOLD_PASSES or decision.is_on != self.is_on:
            return
        period_s = self.quiet.period(each.num_sessions)
        if decision.is_on:
            is_due = now >= self._quiet_due and len(decision.recent) >= (MIN_TRY if period_s is None else 1)
            self._probe = _Probe.QUIET if is_due else None
        elif period_s is not None and now >= decision.due and self._has_settled(now):
            is_cheap = self.lost_s + decision.lost_s <= TRY_BUDGET * (self._busy_s + CREDIT_S) or not self.lost_s
            self._probe = _Probe.TRY if is_cheap else None
        if self._probe is not None:
            self._probed, self._began, self._num_probed, self._loss_s = decision, now, 0, 0.0
            self._tried.clear()

    def _has_settled(self, now: float) -> bool:
        """Return whether the wait for passes without drafting may end, after drafting was switched off.

        It may after enough such passes, or after SETTLE_S seconds without any, since a draft worker goes on computing.
        """
        return self._num_since >= NUM_QUIET or (not self._num_since and now - self._since > SETTLE_S)

    def _end_quiet(self, now: float) -> None:
        """End a probe without drafts: compare its passes with the passes with drafts just before it, and decide."""
        self._probe, decision = None, self._probed
        cost_s = now - self._began + self._arrival_s
        self._quiet_interval_s = min(MAX_INTERVAL_S, 2 * self._quiet_interval_s)
        self._quiet_due, self._usual = now + max(cost_s / QUIET_SHARE, self._quiet_interval_s), None
        if self._num_probed >= NUM_QUIET and len(decision.recent) >= MIN_TRY:
            is_losing = self._is_losing(decision)
            is_losing |= not decision.is_tested and decision.gain <= 1 - MARGIN  # without evidence it does not go on
            if is_losing:
                passes = self._latest(decision)
                decision.gain, _ = self._gain(passes)
                lost = [each.seconds - plain_s for each in passes if (plain_s := self.quiet.plain_s(each))]
                self._loss_s = (self._loss_s or 0.0) + sum(lost)
            self._decide(decision, decision.gain, not is_losing, now)
            self._settle()

    def _decide(self, decision: _Decision, gain: float, is_on: bool, now: float) -> None:
        """Set a decision by the measured gain (speed with drafts over speed without), and when to measure again."""
        if is_on and not decision.is_on:  # soon, since the quiet passes may have been unusual
            self._quiet_interval_s, self._quiet_due = FIRST_INTERVAL_S / 2, now + FIRST_INTERVAL_S
        decision.interval_s = 0.0 if is_on else min(MAX_INTERVAL_S, max(FIRST_INTERVAL_S, 1.5 * decision.interval_s))
        if not is_on:
            decision.due = now + decision.interval_s
            decision.recent.clear()
        else:
            self._loss_s = None
        decision.is_on, decision.gain, decision.is_tested = is_on, gain, True
        self._decisions = {
            octave: each for octave, each in self._decisions.items() if each.is_tested
        }  # others follow it

    def _settle(self) -> None:
        """Add the seconds lost by drafting, if it was just found to be slower, to those lost before.

        This is done once no draft worker computes any more.
        """
        if self._loss_s is None or self._probed.is_on or self._probe is not None:
            return
        self._probed.lost_s, self._loss_s = max(0.0, self._loss_s), None
        self.lost_s += self._probed.lost_s

    def _switch(self, is_on: bool, now: float) -> None:
        self.is_on, self._since, self._num_since, self._has_drafts = is_on, now, 0, False

    def _is_stale(self, passes: Collection[Pass]) -> bool:
        """Return whether passes with drafts have become much quicker since the latest probe without drafts.

        The result of that probe is then out of date.
        """
        ratios = [each.seconds / quiet_s for each in passes if (quiet_s := self.quiet.period(each.num_sessions))]
        ratio = statistics.median(ratios) if ratios else math.inf
        self._usual = ratio if self._usual is None else self._usual
        return ratio < _STALE * self._usual

    def _gain(self, passes: Collection[Pass]) -> tuple[float, float]:
        """Return the gain of `passes`, and its standard error; (1, infinity) while unknown.

        The gain is the seconds that their tokens would have taken without a draft model over those that they took.
        """
        pairs = [(plain_s, each.seconds) for each in passes if (plain_s := self.quiet.plain_s(each)) is not None]
        if not pairs:
            return 1.0, math.inf
        longest = _OUTLIER * statistics.median(seconds for _, seconds in pairs)
        return _ratio([(plain_s, min(seconds, longest)) for plain_s, seconds in pairs])


def _ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of the pairs' first numbers over the sum of their second ones, and its standard error."""
    number, under = len(pairs), sum(y for _, y in pairs)
    ratio = sum(x for x, _ in pairs) / under
    spread = sum((x - ratio * y) ** 2 for x, y in pairs) / max(1, number - 1)
    return ratio, math.sqrt(spread * number) / under + _NOISE / math.sqrt(number)
