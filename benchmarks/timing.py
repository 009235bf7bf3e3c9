"""Timing of several variants in turn, so that a busy moment of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Times:
    """Milliseconds of repeated runs of one variant."""

    samples: list[float] = field(default_factory=list)

    @property
    def minimum(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def interleaved(
    variants: Mapping[str, Callable[[], object]], *, rounds: int, runs: int = 3, seconds: float = 20.0
) -> dict[str, Times]:
    """Time variants in turn; return their times by name.

    In each round every variant runs once as a warm-up, and `runs` times for its times. No round begins after `seconds`,
    except the first two.
    """
    times = {name: Times() for name in variants}
    ends = time.monotonic() + seconds
    for done in range(rounds):
        for name, run in variants.items():
            run()  # its weights and code were evicted by the other variants
            for _ in range(runs):
                started = time.perf_counter()
                run()
                times[name].samples.append((time.perf_counter() - started) * 1e3)
        if done >= 1 and time.monotonic() > ends:
            break
    return times
