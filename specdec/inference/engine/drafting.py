"""On-off switch of all drafting for a target's engine: drafting stops while decoding without draft tokens is faster.

`Counterfactual` decides by the measured times of passes, and the draft workers stop or go on accordingly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from specdec.inference.config import ALWAYS, MEASURED, NEVER
from specdec.inference.scheduling.counterfactual import Change, Counterfactual
from specdec.inference.scheduling.lookups import Lookups
from specdec.inference.scheduling.quiet import Pass

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """Draft workers of an engine, which can all be stopped together."""

    @property
    def computes(self) -> bool:
        """Return whether any worker may be computing for the engine's sessions."""

    @property
    def can_hold(self) -> bool:
        """Return whether all workers stop when they are asked to."""

    def hold(self, *, is_on: bool) -> None:
        """Let the workers draft if `is_on`, else ask them to stop."""


def concern_drafting(gammas: Iterable[int | None]) -> bool:
    """Return whether a pass counts in the measurement of drafting: at least one of its sessions may have draft tokens.

    Args:
        gammas: the most draft tokens of each session; None where the request leaves the number to the server.
    """
    return any(gamma != 0 for gamma in gammas)


class OwnDraft:
    """Draft model that runs in the engine's own passes, in the role of `Workers`; no separate worker process."""

    can_hold = True

    def __init__(self) -> None:
        self.computes = True

    def hold(self, *, is_on: bool) -> None:
        """Record whether drafting is on; while it is off, the engine's own passes leave the draft model out."""
        self.computes = is_on


class Drafting:
    """On-off switch of all drafting for one engine.

    Args:
        mode: ALWAYS (on), NEVER (off), or MEASURED: on while that is not slower than decoding without drafts.
        wake: function that is called at each change, since passes that waited for draft tokens may begin without them.

    Attributes:
        is_on: True if draft workers may compute, and passes verify their tokens.
        num_switches: number of changes of `is_on`.
        rule: decision by measured passes whether drafting is on; it has an effect only if the mode is MEASURED.
        lookups: record of how many tokens prompt lookup finds and passes verify.
    """

    def __init__(self, mode: str = ALWAYS, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self.mode, self.is_on, self.num_switches, self.lookups = mode, mode != NEVER, 0, Lookups()
        self.rule = Counterfactual(is_on=self.is_on)
        self._workers: Workers | None = None
        self._began: tuple[float, bool] | None = None  # start of the latest pass, and whether it was quiet then
        self._pass: Pass | None = None  # without its period

    def follow(self, workers: Workers) -> None:
        """Switch these draft workers on and off from now on, instead of those of an earlier call."""
        self._workers = workers

    def begin_off(self) -> None:
        """Turn drafting off until passes are measured, since the target's passes and the draft share CPU cores.

        This does nothing if the mode is not MEASURED, or if a pass was measured already.
        """
        if self.mode == MEASURED and not self.rule.has_decided:
            self.rule.is_on = self.rule.begins_on = False
            self.switch(is_on=False)

    @property
    def is_quiet(self) -> bool:
        """Return whether no draft worker may be computing at present."""
        return self._workers is None or not self._workers.computes

    def begins(self, now: float) -> None:
        """Note that a pass begins at `now`, in monotonic seconds, and measure the pass before it.

        The time measured for a pass, its period, runs from its start to the start of the next pass.
        """
        began, self._began = self._began, (now, self.is_quiet)
        done, self._pass = self._pass, None
        if began is not None and done is not None:
            since, was_quiet = began
            self.measured(replace(done, seconds=now - since), is_quiet=was_quiet and self._began[1], now=now)

    def measured(self, each: Pass, *, is_quiet: bool, now: float) -> None:
        """Record a measured pass, then turn drafting on or off by all passes so far. Only the mode MEASURED does so.

        If some worker does not stop when asked to, drafting is turned on without regard to the pass.

        Args:
            each: the pass; its `seconds` are its period, the time from its start to the start of the next pass.
            is_quiet: True if no draft worker computed in that period.
            now: time at which the period ended, in monotonic seconds.
        """
        if self.mode != MEASURED or self._workers is None:
            return
        if not self._workers.can_hold:
            self.switch(is_on=True)
        elif each.num_sessions:
            change = self.rule.passed(each, is_quiet=is_quiet, now=now)
            self.switch(is_on=self.rule.is_on)
            if change is not None:
                _log(change)

    def switch(self, *, is_on: bool) -> None:
        """Turn drafting on or off, and tell the draft workers; do nothing if this changes nothing."""
        if is_on != self.is_on:
            self.is_on = is_on
            self.num_switches += 1
            if self._workers is not None:
                self._workers.hold(is_on=is_on)
            self._wake()

    def passed(self, done: Pass, num_found: int, num_verified: int) -> None:
        """Note what the latest pass did; its time is measured only when the next pass begins.

        Args:
            done: the pass, in which the time is 0 as yet.
            num_found: number of tokens that prompt lookup found for the sessions of the pass.
            num_verified: number of these tokens that the pass verified.
        """
        self._pass = done
        self.lookups.passed(done.num_sessions, 0 if done.has_drafts else num_found, num_verified)

    def idle(self) -> None:
        """Note that no session has work, so that the wait until the next pass is not measured as time of the last."""
        self._began = None


def _log(change: Change) -> None:
    logger.info(
        "drafting is %s for about %d sessions: %.2f of the speed of passes without drafts, which take %.1f ms",
        "on" if change.is_on else "off",
        change.num_sessions,
        change.gain,
        change.quiet_s * 1e3,
    )
