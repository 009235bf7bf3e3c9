"""Completion of a job's prompts: with a draft here and a remote target, at any server, or with one model alone."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing, nullcontext
from dataclasses import replace

from specdec.inference.cli.prompts.output import JsonSink, Sink, TextSink, TokenSink, print_summary
from specdec.inference.cli.prompts.results import Result
from specdec.inference.cli.prompts.source import PromptJob
from specdec.inference.commit import Delta
from specdec.inference.config import ConnectionConfig, FusedConfig, ModelConfig
from specdec.inference.errors import CapacityError, SpecDecError
from specdec.inference.observe.profile import Profile
from specdec.inference.observe.stats import RequestStats
from specdec.inference.serving.assembly import target_engine
from specdec.inference.serving.edge import Drafting, edge
from specdec.inference.serving.observers import report_profile, timeline
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import Completer, CompletionRequest

logger = logging.getLogger(__name__)

_Deltas = asyncio.Queue[Delta | None]


async def run_edge(job: PromptJob, connection: ConnectionConfig, drafting: Drafting | None = None) -> int:
    """Complete prompts at any of our servers, or at a target with a draft of this process; return the exit code."""
    async with edge(connection, drafting) as behind:
        with nullcontext() if behind.draft is None else timeline(job.observe, behind.draft.engine):
            return await _complete(job, behind.completer)


async def run_alone(job: PromptJob, model: ModelConfig | FusedConfig) -> int:
    """Complete prompts with a model, or a pair, of this process; return the exit code."""
    async with target_engine(model, max_waiting=len(job.prompts), lookup=False) as running:
        completer = LocalCompleter(running.engine, running.tokenizer)
        with timeline(job.observe, running.engine):
            return await _complete(job, completer)


async def _complete(job: PromptJob, completer: Completer) -> int:
    if job.format == "json":
        with (sink := JsonSink(len(job.prompts))).bar:
            results = await run_prompts(completer, job, sink)
    else:
        sink_of = TokenSink if job.format == "tokens" else TextSink
        results = await run_prompts(completer, job, sink_of(job.template.sampling))
    if job.observe.profile:
        profile = Profile(job.observe.role)
        for result in results:
            profile.add(result.prompt, result.stats)
        print_summary(results)
        report_profile(profile)
    return int(any(result.error is not None for result in results))


async def run_prompts(completer: Completer, job: PromptJob, sink: Sink) -> list[Result]:
    """Complete every prompt and show the results in order; a failed prompt does not stop the others."""
    places = asyncio.Semaphore(job.concurrency)
    results = [Result(prompt) for prompt in job.prompts]
    queues = [_Deltas() for _ in job.prompts]
    async with asyncio.TaskGroup() as group:
        for result, queue in zip(results, queues, strict=True):
            group.create_task(run_prompt(completer, job, places, result, queue))
        for result, queue in zip(results, queues, strict=True):
            await _show(result, queue, sink)
    return results


async def _show(result: Result, queue: _Deltas, sink: Sink) -> None:
    sink.begin(result)
    while (delta := await queue.get()) is not None:
        sink.show(result, delta)
    sink.end(result)


async def run_prompt(
    completer: Completer, job: PromptJob, places: asyncio.Semaphore, result: Result, queue: _Deltas
) -> None:
    """Complete one prompt of a job into `result` and `queue`; send it again if the server is full."""
    request = replace(job.template, prompt=result.prompt)
    async with places:
        ends_at = time.monotonic() + job.deadline_s
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
    completer: Completer, request: CompletionRequest, result: Result, queue: _Deltas
) -> CapacityError | None:
    """Complete one request; return the error if the server was full, else None."""
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
