"""Observer of requests: it writes metrics and an audit line for each, and profile and trace attributes if wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from specdec.inference.caller import audit, caller, request_id
from specdec.inference.commit import TextEvent, TokenEvent
from specdec.inference.observe.metrics import Metrics, RequestMetrics
from specdec.inference.observe.profile import Profile
from specdec.inference.observe.stats import RequestStats
from specdec.inference.workers.calls.status import code_name

CLOCK_MARGIN_S = 0.01
"""Seconds by which gRPC's clock, which ends a call, may be ahead of the event loop's."""
Annotate: TypeAlias = Callable[[RequestStats], None]
"""Function that writes the cost of a request into its trace span; the request's task calls it at the request's end."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Record of one request; `stats` is None unless a profile or a trace span needs statistics."""

    stats: RequestStats | None
    metrics: RequestMetrics

    def take(self, event: TextEvent | TokenEvent) -> None:
        """Count an event that has just arrived."""
        if self.stats is not None:
            self.stats.take(event)
        self.metrics.take(event)


@dataclass(frozen=True, slots=True)
class Observer:
    """Observer of clients' requests.

    Attributes:
        metrics: metrics in which every request is counted.
        profile: collection of a record per request; None: no records are kept.
    """

    metrics: Metrics
    profile: Profile | None = None

    @contextmanager
    def request(
        self, deadline: float | None = None, annotate: Annotate | None = None
    ) -> Generator[Observation, None, None]:
        """Observe the current request; the profile names it by its id.

        A request that has neither finished nor failed by the block's end counts as cancelled, or late after `deadline`.
        """
        stats = None if self.profile is None and annotate is None else RequestStats()
        observation = Observation(stats, self.metrics.request())
        if self.profile is not None and stats is not None:
            self.profile.add(request_id(), stats)
        try:
            yield observation
        except Exception as exc:
            observation.metrics.failed(code_name(exc))
            raise
        finally:
            observation.metrics.left(late=deadline is not None and _now() >= deadline - CLOCK_MARGIN_S)
            if caller().name:
                self._account(observation.metrics)
            if annotate is not None and stats is not None:
                annotate(stats)

    def _account(self, request: RequestMetrics) -> None:
        """Write the audit line of a request, and count it for its account."""
        model, num_tokens, seconds = request.cost
        audit(request.status, model=model, num_tokens=num_tokens, seconds=seconds)
        self.metrics.count_account(caller().account, request.status, request.num_prompt_tokens + num_tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()
