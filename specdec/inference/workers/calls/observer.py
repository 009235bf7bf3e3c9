"""Observer of requests: it counts each one in metrics, writes its audit line, and adds it to a profile or a trace."""

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
"""Seconds by which gRPC may end a call before its deadline by the event loop's clock."""
Annotate: TypeAlias = Callable[[RequestStats], None]
"""Function that writes a request's figures into its trace span; it is called in the request's task when that ends."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Record of one request: metrics, and statistics, which are None unless a profile or trace span needs them."""

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
        profile: profile to which each request's statistics are added; None: there is none.
    """

    metrics: Metrics
    profile: Profile | None = None

    @contextmanager
    def request(
        self, deadline: float | None = None, annotate: Annotate | None = None
    ) -> Generator[Observation, None, None]:
        """Yield the record of the current request, and complete it at the end of the block.

        A request that has neither finished nor failed by then counts as late if `deadline`, a time of the event loop,
        has passed, else as cancelled.

        Args:
            annotate: function to call at the end; None: nothing is traced.
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
