"""Runs many prompts at once and shows them one after another, each as it streams."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from dataclasses import replace

from inference.cli.prompts.output import Sink
from inference.cli.prompts.results import Result
from inference.cli.prompts.source import PromptJob
from inference.commit import Delta
from inference.errors import CapacityError, SpecDecError
from inference.workers.completion import Completer, CompletionRequest

logger = logging.getLogger(__name__)

_Deltas = asyncio.Queue[Delta | None]


async def run_prompts(completer: Completer, job: PromptJob, sink: Sink) -> list[Result]:
    """Complete every prompt; a failed one does not stop the others. The sink is shown them in their order."""
    places = asyncio.Semaphore(job.concurrency)
    results = [Result(prompt) for prompt in job.prompts]
    queues = [_Deltas() for _ in job.prompts]
    async with asyncio.TaskGroup() as group:
        for result, queue in zip(results, queues, strict=True):
            group.create_task(_run(completer, job, places, result, queue))
        for result, queue in zip(results, queues, strict=True):
            await _show(result, queue, sink)
    return results


async def _show(result: Result, queue: _Deltas, sink: Sink) -> None:
    sink.begin(result)
    while (delta := await queue.get()) is not None:
        sink.show(result, delta)
    sink.end(result)


async def _run(completer: Completer, job: PromptJob, places: asyncio.Semaphore, result: Result, queue: _Deltas) -> None:
    request = replace(job.template, prompt=result.prompt)
    async with places:
        ends_at = time.monotonic() + job.deadline_s
        try:
            while (refusal := await _attempt(completer, request, result, queue)) is not None:
                pause_s = refusal.retry_after_s * random.uniform(0.5, 1.5)  # or all who were refused come back at once
                if time.monotonic() + pause_s > ends_at:
                    raise refusal
                logger.info("the server is full; the next attempt is in %.1f s", pause_s)
                await asyncio.sleep(pause_s)
        except SpecDecError as exc:
            result.error = exc
    queue.put_nowait(None)


async def _attempt(
    completer: Completer, request: CompletionRequest, result: Result, queue: _Deltas
) -> CapacityError | None:
    """Complete one request; what the server said if it was full."""
    result.restart()
    try:
        async with aclosing(completer.complete(request)) as events:
            async for event in events:
                result.record(event)
                if isinstance(event, Delta):
                    queue.put_nowait(event)
    except CapacityError as exc:
        return exc
    return None
