"""Tells whoever watches of every request: metrics always, a profile and the current span if they are asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from inference.caller import caller, request_id
from inference.commit import Commit, Event, Started
from inference.observe.metrics import Metrics, RequestMetrics
from inference.observe.profile import Profile
from inference.observe.stats import RequestStats
from inference.workers.completion import Completer, CompletionRequest
from inference.workers.status import code_name

audit = logging.getLogger("specdec.audit")

CLOCK_MARGIN_S = 0.01
"""gRPC ends a call by its own clock, which is not the event loop's."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One request, as it is watched; `stats` is None where nobody will read them."""

    stats: RequestStats | None
    metrics: RequestMetrics

    def take(self, event: Event | Commit) -> None:
        """Pass on what has just arrived."""
        if self.stats is not None:
            self.stats.take(event)
        self.metrics.take(event)


@dataclass(frozen=True, slots=True)
class Observer:
    """Who watches the requests of a process.

    Attributes:
        metrics: counts them.
        profile: keeps a record of each; None keeps none.
        annotate: is told what a request cost, in the request's task, when it ends.
    """

    metrics: Metrics
    profile: Profile | None = None
    annotate: Callable[[RequestStats], None] | None = None

    @contextmanager
    def request(self, label: str, deadline: float | None = None) -> Generator[Observation, None, None]:
        """Watch one request, which tables call `label`.

        One that leaves before it finished failed, or was given up: by its client, or at its `deadline`.
        """
        stats = None if self.profile is None and self.annotate is None else RequestStats()
        observation = Observation(stats, self.metrics.request())
        if self.profile is not None and stats is not None:
            self.profile.add(label, stats)
        try:
            yield observation
        except Exception as exc:
            observation.metrics.failed(code_name(exc))
            raise
        finally:
            observation.metrics.left(late=deadline is not None and _now() >= deadline - CLOCK_MARGIN_S)
            _audit(observation.metrics)
            if self.annotate is not None and stats is not None:
                self.annotate(stats)


def _audit(request: RequestMetrics) -> None:
    """A line for each request of somebody known: never a text, a token id or a secret."""
    who = caller()
    if who.name:
        line = "request=%s caller=%s user=%s model=%s tokens=%d seconds=%.3f status=%s"
        audit.info(line, request_id(), who.name, who.user or "-", *request.cost, request.status)


def _now() -> float:
    return asyncio.get_running_loop().time()


class ObservedCompleter:
    """A completer whose requests are watched; knows how many have started and how many wait."""

    def __init__(self, completer: Completer, observer: Observer) -> None:
        self._completer = completer
        self._observer = observer
        self._num_open = 0
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        return self._num_open - self.num_running

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        started = False
        self._num_open += 1
        try:
            with self._observer.request("request", request.deadline) as observation:
                async with aclosing(self._completer.complete(request)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            started = True
                            self.num_running += 1
                        observation.take(event)
                        yield event
        finally:
            self._num_open -= 1
            self.num_running -= started
