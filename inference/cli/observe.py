"""What watches the requests of a server besides its metrics: a profile and traces, each only if it is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference.cli.reports import profiled
from inference.cli.telemetry import exported
from inference.profile import Profile
from inference.stats import RequestStats
from inference.workers.completion import Completer, ProfilingCompleter

if TYPE_CHECKING:
    from inference.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Observers:
    """Of one process; each may be None."""

    profile: Profile | None
    telemetry: Telemetry | None

    @property
    def annotate(self) -> Callable[[RequestStats], None] | None:
        """Says in the current span what a session cost."""
        return None if self.telemetry is None else self.telemetry.annotate

    def around(self, completer: Completer, *, model: str) -> Completer:
        """The completer, with whatever watches around it."""
        if self.telemetry is not None:
            from inference.workers.traced import TracedCompleter

            completer = TracedCompleter(completer, self.telemetry, model=model)
        return completer if self.profile is None else ProfilingCompleter(completer, self.profile)


@contextmanager
def observed(args: argparse.Namespace) -> Generator[Observers, None, None]:
    """What the flags ask for; written and sent when the block ends."""
    with profiled(args) as profile, exported(args) as telemetry:
        yield Observers(profile, telemetry)
