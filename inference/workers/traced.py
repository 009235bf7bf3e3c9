"""A span for every sequence that passes through."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from inference.commit import Event, Finished
from inference.observe.spans import Spans, current, usage
from inference.observe.stats import RequestStats
from inference.workers.completion import Completer, CompletionRequest


class TracedCompleter:
    """A completer with a span per request, the parent of whatever the completer behind it calls."""

    def __init__(self, completer: Completer, spans: Spans, *, model: str) -> None:
        self._completer = completer
        self._spans = spans
        self._model = model

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        stats = RequestStats()
        with self._spans.generation(self._attributes(request)) as span:
            try:
                async with aclosing(self._completer.complete(request)) as events:
                    while True:
                        with current(span):
                            event = await anext(events, None)
                        if event is None:
                            return
                        stats.take(event)
                        if isinstance(event, Finished):
                            span.set_attribute("gen_ai.response.finish_reasons", (event.reason.value,))
                        yield event
            finally:
                span.set_attributes(usage(stats))

    def _attributes(self, request: CompletionRequest) -> dict[str, str | int | float]:
        return {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": request.max_new_tokens or 0,  # 0: left to the server
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
        }
