"""Roles that complete prompts and end: draft at the edge, fused_client, verify_target, verify_draft."""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc

from grpc_comm.channel import UnreachableError, open_channel, wait_until_ready
from grpc_comm.options import address
from inference.cli.prompts.output import JsonSink, Sink, TextSink, TokenSink, print_summary
from inference.cli.prompts.progress import PromptProgress
from inference.cli.prompts.results import Result
from inference.cli.prompts.runner import run_prompts
from inference.cli.prompts.source import read_prompts
from inference.config import ConnectionConfig, DraftConfig, ModelConfig, ProposerConfig, check_batch
from inference.errors import UnavailableError
from inference.observe.profile import Profile
from inference.request import GenerationRequest, SamplingParams, Schedule
from inference.serving.assembly import draft_worker, load_proposer, target_engine
from inference.serving.observers import report_profile, traced
from inference.text.tokenizer import Tokenizer
from inference.workers.completion import Completer, CompletionRequest
from inference.workers.local import LocalCompleter
from inference.workers.remote import RemoteCompleter

logger = logging.getLogger(__name__)


async def run_draft(args: argparse.Namespace, config: ProposerConfig) -> int:
    """Complete prompts with a local draft and a remote target."""
    template, prompts = request_template(args), read_prompts(args.prompt, args.prompt_text)
    tokenizer = Tokenizer.load(config.tokenizer_path)
    draft = draft_config(args, max_waiting=len(prompts))
    proposer, words = await load_proposer(config)
    async with connected(args) as channel, draft_worker(proposer, draft, words, channel) as (worker, engine):
        with traced(args, engine):
            return await _complete(args, LocalCompleter(worker, tokenizer), prompts, template, text_sink=TextSink())


async def run_client(args: argparse.Namespace) -> int:
    """Complete prompts at any GenerationService."""
    template, prompts = request_template(args), read_prompts(args.prompt, args.prompt_text)
    check_batch(args.batch)
    async with connected(args) as channel:
        completer = RemoteCompleter(channel, address(args.target_host, args.port), deadline_s=args.deadline_s)
        return await _complete(args, completer, prompts, template, text_sink=TextSink())


async def run_alone(args: argparse.Namespace, config: ModelConfig) -> int:
    """Complete prompts with one model of this process."""
    template, prompts = request_template(args), read_prompts(args.prompt, args.prompt_text)
    tokenizer = Tokenizer.load(config.path)
    async with target_engine(config, max_waiting=len(prompts)) as engine:
        completer = LocalCompleter(engine, tokenizer)
        with traced(args, engine):
            return await _complete(args, completer, prompts, template, text_sink=TokenSink(tokenizer))


async def _complete(
    args: argparse.Namespace,
    completer: Completer,
    prompts: list[str],
    template: CompletionRequest,
    *,
    text_sink: Sink,
) -> int:
    if args.format == "text":
        results = await run_prompts(completer, prompts, template, concurrency=args.batch, sink=text_sink)
    else:
        with PromptProgress(len(prompts)) as progress:
            sink = JsonSink(progress)
            results = await run_prompts(completer, prompts, template, concurrency=args.batch, sink=sink)
    if args.profile:
        _write_profile(args.role, results)
    return int(any(result.error is not None for result in results))


def draft_config(args: argparse.Namespace, *, max_waiting: int) -> DraftConfig:
    """How the flags want drafts made."""
    connection = connection_config(args)
    return DraftConfig(
        target_address=address(connection.host, connection.port),
        gamma=args.gamma,
        schedule=Schedule(args.schedule),
        reconnect_timeout_s=args.reconnect_timeout_s,
        deadline_s=args.deadline_s,
        max_waiting=max_waiting,
    )


def connection_config(args: argparse.Namespace) -> ConnectionConfig:
    """Which server the flags name."""
    return ConnectionConfig(args.target_host, args.port, args.connect_timeout_s, args.deadline_s)


def _write_profile(role: str, results: list[Result]) -> None:
    profile = Profile(role)
    for result in results:
        profile.add(result.prompt, result.stats)
    print_summary(results)
    report_profile(profile)


def request_template(args: argparse.Namespace) -> CompletionRequest:
    """What the flags ask of every prompt.

    Raises:
        InvalidRequestError: a value is outside its range.
    """
    seed = args.seed
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=seed or 0,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
    )
    gamma = getattr(args, "gamma", None)
    GenerationRequest((0,), sampling, args.max_new_tokens, gamma=gamma)  # says now what is out of range
    return CompletionRequest(
        prompt="",
        sampling=sampling,
        seed=seed,
        max_new_tokens=args.max_new_tokens,
        gamma=gamma,
        stop=tuple(args.stop),
    )


@asynccontextmanager
async def connected(args: argparse.Namespace) -> AsyncGenerator[grpc.aio.Channel, None]:
    """A channel to the server that the flags name, once it answers."""
    connection = connection_config(args)
    where = address(connection.host, connection.port)
    async with open_channel(where) as channel:
        try:
            await wait_until_ready(channel, where, timeout_s=connection.connect_timeout_s)
        except UnreachableError as exc:
            raise UnavailableError(str(exc)) from exc
        yield channel
