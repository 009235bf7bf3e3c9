"""A completer that keeps each caller within the limits of the auth file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from inference.caller import Caller, Limits, caller
from inference.commit import Event
from inference.errors import CapacityError, InvalidRequestError
from inference.workers.completion import Completer, CompletionRequest


class LimitedCompleter:
    """Passes on what is within its caller's limits; each choice of an HTTP request is a request."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._in_flight: Counter[str] = Counter()
        self._mean_s: dict[str, float] = {}

    def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`; who has no limits gets the events as they are, without a step more for each.

        Raises:
            CapacityError: the caller has as many requests in flight as it may.
            InvalidRequestError: a value is above the caller's limit.
        """
        who = caller()
        return self._completer.complete(request) if who.limits == Limits() else self._limited(request, who)

    async def _limited(self, request: CompletionRequest, who: Caller) -> AsyncGenerator[Event, None]:
        _check(request, who)
        self._begin(who)
        began = time.monotonic()
        try:
            async with aclosing(self._completer.complete(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._in_flight[who.name] -= 1
            took_s, mean_s = time.monotonic() - began, self._mean_s.get(who.name)
            self._mean_s[who.name] = took_s if mean_s is None else mean_s + 0.2 * (took_s - mean_s)

    def _begin(self, who: Caller) -> None:
        limit, num = who.limits.in_flight, self._in_flight[who.name]
        if limit is not None and num >= limit:
            retry_after_s = max(0.1, self._mean_s.get(who.name, 1.0) / limit)
            message = f"{who.name} has {num} requests in flight, its limit is {limit}"
            raise CapacityError(message, retry_after_s=retry_after_s)
        self._in_flight[who.name] += 1


def _check(request: CompletionRequest, who: Caller) -> None:
    """Refuse what is above a limit; what a request leaves open is not (`CompletionRequest.resolved`)."""
    limits = who.limits
    asked = {"max_new_tokens": (request.max_new_tokens, limits.max_tokens)}
    asked["logprobs"] = (request.logprobs, limits.logprobs)
    asked["prompt_logprobs"] = (request.prompt_logprobs, limits.logprobs)
    for name, (value, limit) in asked.items():
        if value is not None and limit is not None and value > limit:
            raise InvalidRequestError(f"{name} {value} is above the limit of {who.name}: {limit}", field=name)
