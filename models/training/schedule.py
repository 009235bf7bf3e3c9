"""Plan of a training run: learning-rate factor and row length as functions of the step."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """Stage that lasts until `until`, a fraction of all steps, with `rows` rows of `length` tokens per step.

    `shares` are the relative numbers of rows of prose, code and structured text.
    """

    until: float
    rows: int
    length: int
    shares: tuple[int, int, int] = (9, 3, 4)


@dataclass(frozen=True)
class Schedule:
    """Schedule of warm-up, stable part and decay; `steps` may change while the run is in its stable part."""

    steps: int
    warm_up: int
    decay: float
    stages: tuple[Stage, ...]

    def factor(self, step: int) -> float:
        """Return the learning-rate factor in (0, 1] at `step`: linear up, flat, linear down to 2 %."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return max(0.02, min(1.0, left))

    def stage(self, step: int) -> Stage:
        """Return the stage in force at `step`."""
        for stage in self.stages:
            if step < stage.until * self.steps:
                return stage
        return self.stages[-1]

    def reread(self, control: Path) -> Schedule:
        """Return this schedule with the number of steps from `{"steps": N}` in `control`, if that file exists."""
        if not control.exists():
            return self
        return replace(self, steps=int(json.loads(control.read_text(encoding="utf-8"))["steps"]))
