"""Wrong variants of the rule of `--drafting measured` lose speed that the right rule keeps, each in one scenario.

The rule compares passes with drafts to "quiet" passes, for which drafting was stopped for a moment (a probe).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specdec.inference.config import MEASURED
from specdec.inference.scheduling.counterfactual import Change, Counterfactual
from specdec.inference.scheduling.quiet import Pass, Quiet
from specdec.inference.speculation.replay import Replay
from tests.support.virtual import outcome_of
from tests.unit.engine.test_never_slower import LOSING
from tests.unit.scheduling.test_counterfactual import Machine, steady


class DueByOctave(Counterfactual):
    """Wrong rule: each number of sessions has its own time for the next probe (a moment without drafting)."""

    def __init__(self, *, is_on: bool) -> None:
        self._dues: dict[int, float] = {}
        super().__init__(is_on=is_on)

    @property
    def _quiet_due(self) -> float:
        return self._dues.get(self._octave, 0.0)

    @_quiet_due.setter
    def _quiet_due(self, due: float) -> None:
        self._dues[self._octave] = due


class NeverRescaled(Quiet):
    """Wrong record of passes without drafts: a new time does not rescale those of other numbers of sessions."""

    def record(self, each: Pass) -> None:
        before = {place: [*recent] for place, recent in self._recent.items()}
        super().record(each)
        own = round(2 * math.log2(each.num_sessions))
        for place, seconds in before.items():
            if place != own:
                self._recent[place].extend(seconds)


class NoQuietPasses(Counterfactual):
    """Wrong rule that never learns of a pass without drafts, and so knows passes with drafts alone."""

    def passed(self, each: Pass, *, is_quiet: bool, now: float) -> Change | None:
        return super().passed(each, is_quiet=False, now=now)


def gain_kept(rule: Counterfactual) -> float:
    """Return the share of a speed-up of 2 by drafts that is left if the number of sessions changes every 12 passes."""
    machine = Machine(rule, plain_s=lambda _: 0.005, tokens=2.0, factor=1.0)
    plain = sum(machine.step((1, 3, 7, 15, 30, 60)[number // 12 % 6]) for number in range(2000))
    return plain / machine.now / 2.0


def speed_after_a_busy_time(quiet: Quiet) -> float:
    """Return the speed over that without drafts, for 11 sessions, where drafts cost more than they give.

    In `quiet`, the record of passes without drafts, those over 11 sessions were measured while the machine was busy.
    """
    pace, rule = [2.0], Counterfactual(is_on=True)
    rule.quiet = quiet
    machine = Machine(rule, plain_s=lambda n: pace[0] * steady(n), tokens=2.0, factor=1.0)
    machine.run(10.0, 11)
    machine.run(10.0, 6)
    pace[0], machine.factor = 1.0, 1.6
    machine.run(10.0, 6)
    machine.factor = 2.9
    return machine.run(5.0, 11)


def test_a_due_time_by_octave_gives_up_a_gain() -> None:
    assert gain_kept(Counterfactual(is_on=True)) >= 0.97
    assert gain_kept(DueByOctave(is_on=True)) < 0.9


def test_quiet_periods_that_are_never_rescaled_hide_a_loss() -> None:
    assert speed_after_a_busy_time(Quiet()) >= 0.95
    assert speed_after_a_busy_time(NeverRescaled()) < 0.9


def test_a_rule_without_quiet_passes_sees_no_loss() -> None:
    machines = [
        Machine(rule(is_on=True), plain_s=steady, tokens=1.2, factor=2.0) for rule in (Counterfactual, NoQuietPasses)
    ]
    right, wrong = (machine.run(10.0) for machine in machines)
    assert right >= 0.97
    assert wrong < 0.7


@pytest.mark.release
def test_tokens_that_are_credited_without_lookup_hide_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a draft, passes have lookups too; a rule that counts one pass per token keeps a draft that loses."""
    scenario = replace(LOSING["lookup on changing text"], seconds=6.0)
    plain, right = (outcome_of(scenario, mode).num_tokens() for mode in (None, MEASURED))
    monkeypatch.setattr(Replay, "record", without_lookup)
    assert right >= 0.97 * plain
    assert outcome_of(scenario, MEASURED).num_tokens() < 0.95 * plain


def without_lookup(replay: Replay, num_tokens: int, verified: tuple[int, int] | None, share: float) -> int:
    """Replace `Replay.record` by a count without lookup: a pass per token if it had drafts, and one pass if not."""
    replay.skip()
    return num_tokens if verified is None else 1
