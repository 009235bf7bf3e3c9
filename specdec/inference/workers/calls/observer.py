"""Observer of requests: it counts each one in metrics, writes it to the audit log, and adds it to profile and trace."""

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
"""Seconds before its deadline, by the event loop's clock, at which gRPC may already end a call as late."""
Annotate: TypeAlias = Callable[[RequestStats], None]
"""Function that writes a request's figures into its trace span; it is called in the request's task when that ends."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Record of one request, for metrics and statistics.

    Attributes:
        stats: figures of the request, such as times and acceptance; None if neither a profile nor a trace needs them.
        metrics: counters and times of the request in the process's metrics.
    """

    stats: RequestStats | None
    metrics: RequestMetrics

    def take(self, event: TextEvent | TokenEvent) -> None:
        """Count an event of the request's answer, which has just arrived."""
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
        """Yield the record of the current request, for the block that answers it, and complete it when the block ends.

        A request that has neither finished nor failed by then counts as late if `deadline`, a time of the event loop,
        has passed, else as cancelled.

        Args:
            annotate: function to call at the end with the request's statistics, for its trace span; None: none.
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
        """Write a request that has ended to the audit log, and count it and its tokens for its caller's account."""
        model, num_tokens, seconds = request.cost
        audit(request.status, model=model, num_tokens=num_tokens, seconds=seconds)
        self.metrics.count_account(caller().account, request.status, request.num_prompt_tokens + num_tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()
