"""Completion of a job's prompts: at servers, with or without a draft in this process, or by models loaded here."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace

from specdec.inference.cli.prompts.output import JsonSink, Sink, TextSink, TokenSink, print_summary
from specdec.inference.cli.prompts.source import PromptJob
from specdec.inference.config import ConnectionConfig, FusedConfig, ModelConfig
from specdec.inference.engine.target import EngineLimits
from specdec.inference.observe.profile import Profile
from specdec.inference.serving.assembly import target_engine
from specdec.inference.serving.edge import Drafting, edge
from specdec.inference.serving.observers import report_profile, timeline
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.prompts import Deltas, run_prompt
from specdec.inference.workers.completing.results import Result
from specdec.inference.workers.completion import Completer


async def run_edge(job: PromptJob, connection: ConnectionConfig, drafting: Drafting | None = None) -> int:
    """Complete prompts at servers; return the exit code, 1 if a prompt failed, else 0.

    With `drafting`, the servers are targets for which this process drafts.
    """
    async with edge(connection, drafting) as behind:
        with nullcontext() if behind.draft is None else timeline(job.observe, behind.draft.engine):
            return await _complete(job, behind.completer)


async def run_alone(job: PromptJob, model: ModelConfig | FusedConfig) -> int:
    """Complete prompts with one model, or target and draft, in this process; return 1 if any prompt failed, else 0."""
    async with target_engine(model, EngineLimits(len(job.prompts), lookup=False)) as running:
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
    """Complete all prompts of a job, show the results in the order of the prompts, and return them.

    A prompt that fails does not stop the others; its result has the error.
    """
    places = asyncio.Semaphore(job.concurrency)
    results = [Result(prompt) for prompt in job.prompts]
    queues: list[Deltas] = [asyncio.Queue() for _ in job.prompts]
    async with asyncio.TaskGroup() as group:
        for result, queue in zip(results, queues, strict=True):
            request = replace(job.template, prompt=result.prompt)
            group.create_task(run_prompt(completer, request, places, result, queue, deadline_s=job.deadline_s))
        for result, queue in zip(results, queues, strict=True):
            await _show(result, queue, sink)
    return results


async def _show(result: Result, queue: Deltas, sink: Sink) -> None:
    sink.begin(result)
    while (delta := await queue.get()) is not None:
        sink.show(result, delta)
    sink.end(result)
