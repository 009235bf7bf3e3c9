"""Completion of one prompt from a program or the command line; it is sent again while the server is full."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from contextlib import aclosing
from typing import TypeAlias

from specdec.inference.commit import Delta
from specdec.inference.errors import CapacityError, SpecDecError
from specdec.inference.observe.stats import RequestStats
from specdec.inference.workers.completing.results import Result
from specdec.inference.workers.completion import Completer, CompletionRequest

logger = logging.getLogger(__name__)

Deltas: TypeAlias = "asyncio.Queue[Delta | None]"


async def run_prompt(
    completer: Completer,
    request: CompletionRequest,
    places: asyncio.Semaphore,
    result: Result,
    queue: Deltas | None = None,
    *,
    deadline_s: float = math.inf,
) -> None:
    """Complete a request, and put the answer, or the error that ended it, into `result`.

    Args:
        places: semaphore of which each request holds one unit while it runs, which limits how many run at once.
        result: record of the answer, to which each event is added.
        queue: queue that gets each part of the answer as it comes, and then None; None if nobody reads the parts.
        deadline_s: seconds for which the request is sent again while the server refuses it because it is full.
    """
    queue = asyncio.Queue() if queue is None else queue
    async with places:
        ends_at = time.monotonic() + deadline_s
        try:
            while (refusal := await _attempt(completer, request, result, queue)) is not None:
                # Random, so that refused requests do not return all at once.
                pause_s = refusal.retry_after_s * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s > ends_at:
                    raise refusal
                logger.info("the server is full; the next attempt is in %.1f s", pause_s)
                await asyncio.sleep(pause_s)
        except SpecDecError as exc:
            result.error = exc
    queue.put_nowait(None)


async def _attempt(
    completer: Completer, request: CompletionRequest, result: Result, queue: Deltas
) -> CapacityError | None:
    """Send a request, and put its answer into `result`; return the error if the server was full, else None."""
    result.stats = RequestStats()  # the clock starts when the request is sent
    try:
        async with aclosing(completer.complete(request)) as events:
            async for event in events:
                result.record(event)
                if isinstance(event, Delta):
                    queue.put_nowait(event)
    except CapacityError as exc:
        return exc
    return None
