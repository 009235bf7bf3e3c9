"""Completing prompts and ending: with a draft here and a remote target, at any server, or with one model alone."""

from __future__ import annotations

from inference.cli.prompts.output import JsonSink, PromptProgress, Sink, TextSink, TokenSink, print_summary
from inference.cli.prompts.results import Result
from inference.cli.prompts.runner import run_prompts
from inference.cli.prompts.source import PromptJob
from inference.config import ConnectionConfig, DraftConfig, ModelConfig, ProposerConfig
from inference.observe.profile import Profile
from inference.serving.assembly import draft_worker, load_proposer, target_engine
from inference.serving.observers import report_profile, timeline
from inference.workers.completion import Completer
from inference.workers.failover import FailoverCompleter
from inference.workers.fleet import connected
from inference.workers.local import LocalCompleter
from inference.workers.remote import card_of_target


async def run_draft(job: PromptJob, proposer: ProposerConfig, draft: DraftConfig) -> int:
    """Complete prompts with a local draft and a remote target; returns the exit code."""
    async with connected(draft.connection) as fleet:
        await card_of_target(fleet)
        loaded = await load_proposer(proposer)
        async with draft_worker(loaded, draft, fleet) as (worker, engine):
            with timeline(job.observe, engine):
                return await _complete(job, LocalCompleter(worker, loaded.tokenizer), TextSink())


async def run_client(job: PromptJob, connection: ConnectionConfig) -> int:
    """Complete prompts at any GenerationService; returns the exit code."""
    async with connected(connection) as fleet:
        return await _complete(job, FailoverCompleter(fleet, connection), TextSink())


async def run_alone(job: PromptJob, model: ModelConfig) -> int:
    """Complete prompts with one model of this process; returns the exit code."""
    async with target_engine(model, max_waiting=len(job.prompts), lookup=False) as running:
        completer = LocalCompleter(running.engine, running.tokenizer)
        with timeline(job.observe, running.engine):
            return await _complete(job, completer, TokenSink(running.tokenizer))


async def _complete(job: PromptJob, completer: Completer, text_sink: Sink) -> int:
    if job.as_json:
        with PromptProgress(len(job.prompts)) as progress:
            results = await run_prompts(completer, job, JsonSink(progress))
    else:
        results = await run_prompts(completer, job, text_sink)
    if job.observe.profile:
        _write_profile(job.observe.role, results)
    return int(any(result.error is not None for result in results))


def _write_profile(role: str, results: list[Result]) -> None:
    profile = Profile(role)
    for result in results:
        profile.add(result.prompt, result.stats)
    print_summary(results)
    report_profile(profile)
