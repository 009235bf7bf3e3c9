"""Rule of `--drafting measured`: it decides whether drafting goes on, here for passes whose times are known.

The rule compares passes with drafts to passes without, for which it stops drafting for a moment (a probe).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specdec.inference.scheduling.counterfactual import Counterfactual
from specdec.inference.scheduling.quiet import NUM_QUIET, Pass, Quiet


def quiet_pass(num_sessions: int, seconds: float, num_prompt_tokens: int = 0) -> Pass:
    return Pass(num_sessions, num_sessions, 0, num_prompt_tokens, has_drafts=False, seconds=seconds)


class Machine:
    """Target with passes of known times; drafts make a pass `factor` times as long, and give `tokens` per session.

    `plain_s` gives the seconds of a pass without drafts, which gives one token per session, by number of sessions.
    """

    def __init__(self, rule: Counterfactual, *, plain_s: Callable[[int], float], tokens: float, factor: float) -> None:
        self.rule, self.plain_s, self.tokens, self.factor = rule, plain_s, tokens, factor
        self.now = self.plain = 0.0
        self._rng = random.Random(1)
        self._num_since = 0

    def run(self, seconds: float, num_sessions: int = 4) -> float:
        """Run passes for `seconds` of the machine's own time; return its speed over that of decoding without drafts."""
        began, plain = self.now, 0.0
        while self.now < began + seconds:
            plain += self.step(num_sessions)
        return plain / (self.now - began)

    def step(self, num_sessions: int) -> float:
        """Run a pass; return the seconds that decoding without drafts would have taken for its tokens."""
        is_on, period_s = self.rule.is_on, self.plain_s(num_sessions)
        took = period_s * (self.factor if is_on else 1.0) * self._rng.lognormvariate(0.0, 0.05)
        num_plain = num_sessions * (self.tokens if is_on else 1.0)
        each = Pass(num_sessions, num_plain, 8 * is_on, 0, has_drafts=is_on, seconds=took)
        self.now += took
        self.rule.passed(each, is_quiet=not is_on, now=self.now)
        return num_plain / num_sessions * period_s


def steady(num_sessions: int) -> float:
    return 0.005 + 0.0005 * num_sessions


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize(("tokens", "factor"), [(1.2, 2.0), (1.0, 1.2), (2.0, 1.0), (1.5, 1.2)])
def test_it_is_never_much_slower_than_the_better_way(is_on: bool, tokens: float, factor: float) -> None:
    machine = Machine(Counterfactual(is_on=is_on), plain_s=steady, tokens=tokens, factor=factor)
    speed = machine.run(20.0)
    assert speed >= 0.97 * max(1.0, tokens / factor)
    assert machine.rule.lost_s <= 0.02 * 20 + 0.1
    assert machine.rule.is_on == (tokens > factor)


def test_a_change_is_noticed_both_ways() -> None:
    machine = Machine(Counterfactual(is_on=True), plain_s=steady, tokens=2.0, factor=1.0)
    machine.run(5.0)
    machine.factor = 3.0
    assert machine.run(10.0) >= 0.95
    machine.factor = 1.0
    machine.run(20.0)
    assert machine.run(5.0) > 1.8


def test_a_slower_machine_is_no_loss_by_drafts() -> None:
    """Drafting goes on if all passes become slower, and stops if passes become faster but drafts cost more.

    Times of earlier passes without drafts mislead in both cases, so the rule measures new ones before it stops.
    """
    pace = [1.0]
    machine = Machine(Counterfactual(is_on=True), plain_s=lambda n: pace[0] * steady(n), tokens=1.5, factor=1.0)
    machine.run(5.0)
    pace[0] = 3.0
    assert machine.run(10.0) >= 1.4
    pace[0], machine.factor = 1.0, 2.0
    assert machine.run(10.0) >= 0.95


def test_passes_over_other_numbers_of_sessions_become_slower_too() -> None:
    """If passes without drafts become slower for one number of sessions, times for other numbers are scaled likewise.

    Regression: for another number of sessions, a time measured in a busy minute made drafts look good.
    """
    quiet = Quiet()
    for seconds in (0.006, 0.012):
        for _ in range(NUM_QUIET):
            quiet.record(quiet_pass(2, seconds))
        if seconds < 0.01:
            for _ in range(NUM_QUIET):
                quiet.record(quiet_pass(16, 0.010))
    assert quiet.period(16) == pytest.approx(0.020, rel=0.01)
    assert quiet.period(2) == pytest.approx(0.012)


def test_prompts_in_passes_are_credited() -> None:
    quiet = Quiet()
    for _ in range(NUM_QUIET):
        quiet.record(quiet_pass(4, 0.008))
    assert quiet.plain_s(quiet_pass(4, 0.01, 20)) is None, "no prompt has been read yet"
    quiet.record(quiet_pass(4, 0.010, 20))
    assert quiet.plain_s(quiet_pass(4, 0.05, 40)) == pytest.approx(0.012)
    assert quiet.plain_s(quiet_pass(400, 0.05)) is None, "nothing like it is known"


def test_a_burst_of_prompts_is_not_credited_with_chance() -> None:
    """A prompt token seems to take at most twice its time, though periods vary by more than short prompts take.

    Regression: few prompts of 15 tokens in slow passes made a token seem to take four times its time, so that passes
    with drafts, which read many prompts at once, seemed to gain where they lost a third.
    """
    token_s = 0.0002
    for seed in range(20):
        quiet, rng = Quiet(), random.Random(seed)
        for number in range(300):
            num_tokens, period_s = rng.choice([0, 15, 15, 30, 60, 100]), 0.05 * rng.choice([0.8, 1.0, 1.15])
            quiet.record(quiet_pass(64, period_s + num_tokens * token_s, num_tokens))
            credit_s = quiet.plain_s(Pass(64, 0.0, 0, 400, has_drafts=True))
            assert number < 150 or (credit_s is not None and credit_s < 2 * 400 * token_s)


def test_one_visit_to_another_number_of_sessions_starts_no_probe() -> None:
    """A short change of the number of sessions does not stop drafting for a probe (a measurement without drafts).

    Regression: each number of sessions had probes of its own, and 106 of them took most of the gain by drafts.
    """
    machine = Machine(Counterfactual(is_on=True), plain_s=steady, tokens=2.0, factor=1.0)
    num_switches, was_on = 0, True
    for number in range(4000):
        machine.step(1 if number % 9 == 0 else 6 if number % 7 == 0 else 3)
        num_switches += machine.rule.is_on != was_on
        was_on = machine.rule.is_on
    assert num_switches <= 16


def test_without_quiet_passes_nothing_is_decided() -> None:
    """Drafting goes on if a worker does not stop when asked to, since there are no passes without drafts to compare."""
    rule = Counterfactual(is_on=True)
    for number in range(3000):
        each = Pass(4, 4.0, 8, 0, has_drafts=rule.is_on, seconds=0.01)
        rule.passed(each, is_quiet=False, now=0.01 * number)
    assert rule.is_on
    assert rule.lost_s == 0
