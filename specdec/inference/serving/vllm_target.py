"""Life cycle of a target with vLLM as its engine: it starts vLLM, warms it up, serves, and ends all processes.

vLLM runs in processes of its own. They and this process are in one process group, so that all can be ended together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from specdec.inference.backends.identity import model_id_of
from specdec.inference.config import ALWAYS, HttpConfig, ObserveConfig, ServerConfig, model_name
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.target import EngineLimits
from specdec.inference.errors import ConfigError, SpecDecError
from specdec.inference.request import GenerationRequest, Noise, SamplingParams, Schedule
from specdec.inference.serving.assembly import RunningTarget
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.observers import observed
from specdec.inference.serving.target import serve
from specdec.inference.speculation.tree import Branch
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.vllm.engine import VllmEngine, VllmMetrics
from specdec.inference.vllm.group import end_members, leads_group
from specdec.inference.vllm.hooks import installed
from specdec.inference.vllm.link import Place
from specdec.inference.vllm.mailbox import Mailbox
from specdec.inference.vllm.options import VllmModel, adapters_of, engine_config, is_invariant, noise_of
from specdec.inference.vllm.refusals import FIRST_ERROR, cause_of, refusals
from specdec.inference.vllm.translation import KEY, METHOD
from specdec.inference.workers.completing.remote import FUSED, TARGET

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
WAIT_S = 1.0
"""Seconds between SIGTERM and SIGKILL for processes that vLLM's own shutdown has left running."""


async def serve_vllm(model: VllmModel, server: ServerConfig, http: HttpConfig | None, observe: ObserveConfig) -> None:
    """Serve a model with vLLM to draft workers and clients, until a signal or until an engine core of vLLM ends.

    Raises:
        ConfigError: vLLM refuses the model or a flag, or a port is taken.
        InternalError: vLLM has ended.
    """
    _keep_stdout()
    ports = Ports(server, observe, http)
    with observed(observe) as observers:
        async with vllm_engine(model, server) as (running, model_id):
            topology = TARGET if model.method == METHOD else FUSED
            await serve(running, model_name(model.path), model_id, topology, ports, observers)


@asynccontextmanager
async def vllm_engine(model: VllmModel, server: ServerConfig) -> AsyncGenerator[tuple[RunningTarget, str], None]:
    """Start vLLM, and this project's engine in front of it; yield that engine, warmed up, and the model's id.

    Raises:
        ConfigError: vLLM refuses the model or a flag.
    """
    tokenizer = Tokenizer.load(model.path)
    config = await asyncio.to_thread(engine_config, model)
    eos, words, noise = tokenizer.eos_token_ids, config.model_config, noise_of(config, model.noise)
    model_id = await asyncio.to_thread(model_id_of, model.path, *laws(config, eos, noise))
    folder = TemporaryDirectory(prefix="specdec-", ignore_cleanup_errors=True)
    mailbox = Mailbox(Path(folder.name), model_id)
    await mailbox.open()
    os.register_at_fork(after_in_child=partial(_part, mailbox))
    os.environ[FIRST_ERROR] = str(mailbox.path.with_name("first_error"))
    group = os.getpgrp() if leads_group() else 0
    rules = replace(Place(str(mailbox.path), model_id), group=group, lookup=server.lookup)
    config.additional_config = {KEY: asdict(replace(rules, answers_bytes=int(server.replay * 2**20)))}
    limits = EngineLimits(server.max_waiting, model.gamma, eos, server.pass_timeout_s)
    limits = replace(limits, noise=noise, drafting=server.drafting if model.method == METHOD else ALWAYS)
    try:
        async with _llm(config, model.flags) as llm:
            await mailbox.until_linked(config.parallel_config.data_parallel_size)
            compiler = GrammarCompiler(tokenizer, words.get_vocab_size())
            num_slots = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
            grammars = Grammars(compiler, server.max_waiting + num_slots)
            await grammars.warm_up()
            engine = VllmEngine(llm, mailbox, limits, grammars)
            await _warm_up(engine, config.parallel_config.data_parallel_size)
            engine.adapters, digests = await _adapters(llm, model)
            running = RunningTarget(engine, tokenizer, collectors=(VllmMetrics,), adapters=digests, noise=noise)
            yield running, model_id
    finally:
        await mailbox.close()
        folder.cleanup()
        if leads_group():
            await asyncio.to_thread(end_members, os.getpgrp(), WAIT_S)


def laws(config: Any, eos: frozenset[int], noise: Noise) -> tuple[str, str]:
    """Return two texts that name what a model's output depends on beside its files: the arithmetic and where it ends.

    Both become a part of the model's id, so that no server continues an answer for which it would choose other tokens.

    Args:
        config: vLLM's configuration.
        eos: ids of the tokens that end an output.
        noise: rule by which a seed gives the random numbers of a choice of tokens.
    """
    words = config.model_config
    arithmetic = f"vllm {installed()} {words.dtype} {words.quantization}" + " invariant" * is_invariant()
    runner = " V2" * config.use_v2_model_runner  # where vLLM itself chooses
    ends = f"{sorted(eos)} {words.max_model_len}" + ("" if noise is Noise.SPECDEC else f" {noise}")
    return arithmetic + runner, ends


def _part(mailbox: Mailbox) -> None:
    """Give up, in a process that vLLM has forked, what belongs to its parent: signals of the event loop, the socket."""
    signal.set_wakeup_fd(-1)
    mailbox.forget()


@asynccontextmanager
async def _llm(config: Any, flags: Sequence[str]) -> AsyncGenerator[Any, None]:
    """Yield vLLM's `AsyncLLM`, whose worker processes choose tokens by this project's rule; shut it down at the end.

    Args:
        config: vLLM's configuration.
        flags: the user's flags of vLLM; an error names the one that it is about.

    Raises:
        ConfigError: vLLM refuses the model or a flag.
    """
    started = time.monotonic()
    with refusals(flags):  # a thread, so that signals count during the minute that it takes
        llm = await asyncio.to_thread(AsyncLLM.from_vllm_config, config)
    runner = "V2" if config.use_v2_model_runner else "V1"
    logger.info("vLLM %s is up with its runner %s after %.1f s", installed(), runner, time.monotonic() - started)
    try:
        yield llm
    finally:
        if not llm.errored:  # else it would wait for processes that are gone
            await asyncio.to_thread(llm.shutdown)


async def _adapters(llm: Any, model: VllmModel) -> tuple[dict[str, LoRARequest], dict[str, str]]:
    """Load the model's adapters (LoRA) into vLLM; return them and their digests, by name.

    Raises:
        ConfigError: vLLM refuses one.
    """
    paths, _ = adapters_of(model.flags)
    adapters = {name: LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(paths.items(), 1)}
    for adapter in adapters.values():
        with refusals():
            await llm.add_lora(adapter)
    return adapters, {name: await asyncio.to_thread(model_id_of, path) for name, path in paths.items()}


async def _warm_up(engine: VllmEngine, num_ranks: int) -> None:
    """Answer sampled requests with draft tokens and log-probabilities, to see that vLLM can run the model.

    Args:
        num_ranks: number of vLLM's data-parallel ranks; as many requests are sent at once, so that each has one.

    Raises:
        ConfigError: a pass failed.
    """
    started = time.monotonic()
    try:
        for token_ids in await asyncio.gather(*(_answer(engine, ()) for _ in range(num_ranks))):
            await _answer(engine, token_ids)
    except SpecDecError as exc:
        raise ConfigError(f"vLLM {installed()} cannot run this model: {cause_of(exc)}") from exc
    logger.info("warmed up in %.1f s", time.monotonic() - started)


async def _answer(engine: VllmEngine, proposal: Sequence[int]) -> list[int]:
    """Return the output of a short request, for which `proposal` is verified as a draft worker's tokens would be."""
    prompt = tuple(range(min(4, engine.vocab_size)))
    sampling, length = SamplingParams(temperature=1.0), min(WARM_UP_TOKENS, engine.max_length - len(prompt))
    session = engine.open(GenerationRequest(prompt, sampling, length, logprobs=1, prompt_logprobs=1))
    engine.begin_help(session, Schedule.ASYNC)
    engine.propose(session, [Branch(None, len(prompt), proposal)] if proposal else [])
    async with aclosing(engine.answer(session)) as events:
        async for _ in events:
            pass
    return session.token_ids[len(prompt) :]


def _keep_stdout() -> None:
    """Let all that this process and its children print go to stderr, except what is written to `sys.stdout` here."""
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", buffering=1)
