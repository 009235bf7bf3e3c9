"""Feeds the metrics with what passes through: completions, or the commits of a draft worker's session."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager

from inference.commit import Commit
from inference.observe.metrics import Metrics, RequestMetrics
from inference.observe.profile import Profile
from inference.observe.stats import RequestStats
from inference.workers.completion import Completer, CompletionRequest, Delta, Event, Started
from inference.workers.status import code_name


class MeteredCompleter:
    """Counts its requests; knows how many have started and how many wait."""

    def __init__(self, completer: Completer, metrics: Metrics) -> None:
        self._completer = completer
        self._metrics = metrics
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
            with _recorded(self._metrics) as record:
                async with aclosing(self._completer.complete(request)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            started = True
                            self.num_running += 1
                        _record_event(record, event)
                        yield event
        finally:
            self._num_open -= 1
            self.num_running -= started


def _record_event(record: RequestMetrics, event: Event) -> None:
    if isinstance(event, Started):
        record.started(event.num_prompt_tokens)
    elif isinstance(event, Delta):
        _record_tokens(record, event)
    else:
        record.finished(event.reason)


def _record_tokens(record: RequestMetrics, source: Delta | Commit) -> None:
    record.committed(
        len(source.token_ids),
        num_draft_tokens=source.num_draft_tokens,
        num_accepted_tokens=source.num_accepted_tokens,
        timings=source.timings,
    )


async def metered_commits(
    commits: AsyncGenerator[Commit, None], metrics: Metrics, *, num_prompt_tokens: int
) -> AsyncGenerator[Commit, None]:
    """The same commits, counted."""
    with _recorded(metrics) as record:
        record.started(num_prompt_tokens)
        async with aclosing(commits):
            async for commit in commits:
                _record_tokens(record, commit)
                if commit.finish_reason is not None:
                    record.finished(commit.finish_reason)
                yield commit


@contextmanager
def _recorded(metrics: Metrics) -> Generator[RequestMetrics, None, None]:
    """A request's record; one that is left before it finished has failed, or its client has gone."""
    record = metrics.request()
    try:
        yield record
    except Exception as exc:
        record.failed(code_name(exc))
        raise
    finally:
        record.left()


class ProfilingCompleter:
    """A completer that keeps a record of every request, as this process sees it."""

    def __init__(self, completer: Completer, profile: Profile) -> None:
        self._completer = completer
        self._profile = profile

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        """See `Completer`."""
        stats = RequestStats()
        self._profile.add(request.label, stats)
        async with aclosing(self._completer.complete(request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    stats.num_prompt_tokens = event.num_prompt_tokens
                elif isinstance(event, Delta):
                    stats.record(len(event.token_ids), event.num_draft_tokens, event.num_accepted_tokens, event.timings)
                yield event
