"""Request scope: what a process does around the answer to a request that came by gRPC, by HTTP or from a program.

The parts nest in this order, outermost first: the request's trace span; metrics, profile and audit log; the limits of
its caller; its deadline, and its end when the process stops. `SupervisedCompleter` alone determines this order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from specdec.inference.caller import Caller, CallerLimits, caller
from specdec.inference.commit import Finished, Started, TextEvent
from specdec.inference.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    SpecDecError,
    UnavailableError,
)
from specdec.inference.workers.calls.observer import Observation, Observer
from specdec.inference.workers.completion import Completer, CompletionRequest

if TYPE_CHECKING:
    from specdec.inference.observe.spans import GenerationSpan, Spans

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"


class RequestScope:
    """Context manager around each wait for an event of one request's answer.

    It ends the wait at the request's deadline, or when the process stops.

    Only these waits are interrupted, never what the reader of the events awaits between them. A single timer serves all
    waits, since `asyncio.timeout` around each would cost 3 us per token.

    Args:
        deadline: event-loop time at which the request ends with DeadlineError; None: there is no limit.
        observation: record in which the request's events are counted; None: they are not.
        span: trace span that is the current one during each wait; None: nothing is traced.

    Attributes:
        has_started: True once the answer has begun.
    """

    def __init__(
        self,
        deadline: float | None = None,
        observation: Observation | None = None,
        span: GenerationSpan | None = None,
    ) -> None:
        self.has_started = False
        self._observation = observation
        self._span = span
        self._current: AbstractContextManager[object] = nullcontext()
        self._waiting: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._error: SpecDecError | None = None
        loop = asyncio.get_running_loop()
        late = DeadlineError("the request is not finished at its deadline")
        self._timer = None if deadline is None else loop.call_at(deadline, self.end, late)

    def take(self, event: TextEvent) -> None:
        """Count an event of the answer, before it is passed on to whoever reads the answer."""
        self.has_started = self.has_started or isinstance(event, Started)
        if self._observation is not None:
            self._observation.take(event)
        if self._span is not None and isinstance(event, Finished):
            self._span.finished(event.reason.value)

    def end(self, error: SpecDecError) -> None:
        """End the request: the present wait and all later ones raise `error`. A second call changes nothing."""
        if self._error is not None:
            return
        self._error = error
        if self._waiting is not None:
            self._waiting.cancel()

    def close(self) -> None:
        """Stop the deadline's timer."""
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        task = self._waiting = asyncio.current_task()
        self._num_cancels = 0 if task is None else task.cancelling()
        if self._span is not None:
            self._current = self._span.current()
            self._current.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is not None:
            self._current.__exit__(None, None, None)
        task, self._waiting = self._waiting, None
        if self._error is None or task is None:
            return
        is_ours = task.cancelling() <= self._num_cancels + 1  # else the task was cancelled from outside as well
        task.uncancel()
        if kind is asyncio.CancelledError and is_ours:
            raise self._error from None


class SupervisedCompleter:
    """Completer that passes requests on to another one, with metrics, limits and a deadline around each.

    In a gateway, where no engine runs, the process's host (inference/serving/host.py) stops this object when it drains.

    Args:
        completer: completer that answers the requests.
        observer: observer of every request.
        spans: source of a trace span for every request; None: nothing is traced.
        model: name of the model, for the trace spans.
    """

    fault = broken = None
    hangs = False

    def __init__(
        self, completer: Completer, observer: Observer, spans: Spans | None = None, *, model: str = ""
    ) -> None:
        self._completer = completer
        self._observer = observer
        self._spans = spans
        self._model = model
        self._in_flight = InFlight()
        self._scopes: set[RequestScope] = set()
        self._left = asyncio.Event()
        self._end: SpecDecError | None = None

    @property
    def num_running(self) -> int:
        """Return the number of requests whose answer has begun and not ended."""
        return sum(scope.has_started for scope in self._scopes)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests whose answer has not begun."""
        return len(self._scopes) - self.num_running

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield the events of the answer to a request, after a check of its caller's limits.

        Raises:
            CapacityError: the caller has as many requests in flight as it may.
            InvalidRequestError: a value is above the caller's limit.
            DeadlineError: the request is not finished at its deadline.
            UnavailableError: the process is stopping, and the time for running requests is over.
            SpecDecError: the other completer failed; see `Completer.complete`.
        """
        with self._scope(request) as scope:
            async with aclosing(self._completer.complete(request)) as events:
                while True:
                    with scope:
                        event = await anext(events, None)
                    if event is None:
                        return
                    scope.take(event)
                    yield event

    @contextmanager
    def _scope(self, request: CompletionRequest) -> Generator[RequestScope, None, None]:
        with self._span(request) as span:
            annotate = None if span is None else span.annotate
            with self._observer.request(request.deadline, annotate) as observation:
                scope = RequestScope(request.deadline, observation, span)
                self._scopes.add(scope)
                try:
                    with self._in_flight.held(caller(), request):
                        if self._end is not None:
                            scope.end(self._end)
                        yield scope
                except InternalError as exc:
                    if exc.address is None:  # else its server has the line
                        kind = "no grammar" if request.grammar is None else f"a grammar ({request.grammar.kind.value})"
                        logger.error("a request with %s failed: %s", kind, exc.message)
                    raise
                finally:
                    scope.close()
                    self._scopes.discard(scope)
                    self._left.set()

    def _span(self, request: CompletionRequest) -> AbstractContextManager[GenerationSpan | None]:
        if self._spans is None:
            return nullcontext()
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": request.max_new_tokens or 0,  # 0: left to the server
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
        }
        return self._spans.generation(attributes)

    async def stop(self, *, grace_s: float) -> None:
        """Let running requests finish for `grace_s` seconds; then fail those that still run, and all later ones."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._scopes:
                    self._left.clear()
                    await self._left.wait()
        self._end = UnavailableError(SHUTTING_DOWN)
        for scope in self._scopes:
            scope.end(self._end)


class InFlight:
    """Counts of the requests in flight of each caller that has limits; an HTTP request counts once for each choice."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        self._mean_s: dict[str, float] = {}

    @contextmanager
    def held(self, who: Caller, request: CompletionRequest) -> Generator[None, None, None]:
        """Check a request against its caller's limits, and count it as in flight for this caller during the block.

        Raises:
            CapacityError: the caller has as many requests in flight as it may.
            InvalidRequestError: a value is above the caller's limit.
        """
        if who.limits == CallerLimits():
            yield
            return
        _check(request, who)
        limit, num = who.limits.in_flight, self._num[who.name]
        if limit is not None and num >= limit:
            retry_after_s = max(0.1, self._mean_s.get(who.name, 1.0) / limit)
            message = f"{who.name} has {num} requests in flight, its limit is {limit}"
            raise CapacityError(message, retry_after_s=retry_after_s)
        self._num[who.name] += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._num[who.name] -= 1
            took_s, mean_s = time.monotonic() - began, self._mean_s.get(who.name)
            self._mean_s[who.name] = took_s if mean_s is None else mean_s + 0.2 * (took_s - mean_s)


def _check(request: CompletionRequest, who: Caller) -> None:
    """Raise InvalidRequestError if a value that the request sets exceeds its caller's limit.

    If the request leaves its number of tokens open, `CompletionRequest.resolved` lowers the default to the limit later.
    """
    limits = who.limits
    asked = {
        "max_new_tokens": (request.max_new_tokens, limits.max_tokens),
        "logprobs": (request.logprobs, limits.logprobs),
        "prompt_logprobs": (request.prompt_logprobs, limits.logprobs),
    }
    for name, (value, limit) in asked.items():
        if value is not None and limit is not None and value > limit:
            raise InvalidRequestError(f"{name} {value} is above the limit of {who.name}: {limit}", field=name)
