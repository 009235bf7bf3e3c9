"""Roles that serve until a signal: target, fused_target, and draft with --serve."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from grpc_comm.options import address
from grpc_comm.server import PortTakenError, Server, stop_signal
from grpc_comm.spans import SpanInterceptor
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.backends.identity import model_identity
from inference.cli.beside import HttpServer, beside_grpc
from inference.cli.generate import connected, draft_config
from inference.commit import Generator
from inference.config import ModelConfig, ProposerConfig, ServerConfig, check_gamma
from inference.engine.draft import DraftEngine
from inference.engine.loop import Engine
from inference.engine.pool import DraftPool
from inference.errors import ConfigError, SpecDecError
from inference.observe.metrics import Metrics
from inference.scheduling.draft_length import DraftLength
from inference.serving.assembly import draft_worker, fused_engine, load_proposer, running, target_engine
from inference.serving.observers import Observers, continuing, observed, traced
from inference.text.tokenizer import Tokenizer
from inference.text.vocabulary import Vocabulary
from inference.workers import generation
from inference.workers.completion import ModelCard
from inference.workers.draft.pool_member import assist
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.observed import Observer
from inference.workers.remote import RemoteCompleter
from inference.workers.status import to_status
from inference.workers.target import verification
from inference.workers.target.verification import TargetIdentity, VerificationServicer

logger = logging.getLogger(__name__)

CARD_TIMEOUT_S = 5.0


async def serve_target(args: argparse.Namespace, config: ModelConfig, server: ServerConfig) -> int:
    """Serve a target: verification for draft workers, and generation without any."""
    tokenizer, metrics = Tokenizer.load(config.path), Metrics(config.path.name)
    with observed(args) as observers:
        async with target_engine(config, max_waiting=server.max_waiting) as engine:
            pool = DraftPool(engine)
            verifier = VerificationServicer(
                engine,
                pool,
                TargetIdentity(
                    Vocabulary(tokenizer.fingerprint, engine.vocab_size),
                    model_identity(config.path, config.dtype, config.backend, config.device),
                ),
                idle_timeout_s=server.idle_timeout_s,
                observer=Observer(metrics, observers.profile, observers.annotate),
            )
            generator = _generation(pool, tokenizer, config.path.name, "target", observers, metrics)

            def register(grpc_server: grpc.aio.Server) -> None:
                rpc.add_VerificationServiceServicer_to_server(verifier, grpc_server)
                rpc.add_GenerationServiceServicer_to_server(generator, grpc_server)

            names = [verification.SERVICE_NAME, generation.SERVICE_NAME]
            return await _until_signal(args, server, names, register, engine, generator, metrics, observers)


async def serve_fused(
    args: argparse.Namespace, target: ModelConfig, draft: ProposerConfig, server: ServerConfig
) -> int:
    """Serve generation with both models in this process."""
    tokenizer, metrics = Tokenizer.load(target.path), Metrics(target.path.name)
    gamma = check_gamma(args.gamma)
    with observed(args) as observers:
        length = DraftLength() if args.adaptive_gamma else None
        async with fused_engine(target, draft, max_waiting=server.max_waiting, gamma=gamma, length=length) as engine:
            return await _serve_generation(
                _generation(engine, tokenizer, target.path.name, "fused", observers, metrics),
                args,
                server,
                engine,
                metrics,
                observers,
            )


async def serve_draft(args: argparse.Namespace, config: ProposerConfig, server: ServerConfig) -> int:
    """Serve generation with a local draft and a remote target."""
    draft = draft_config(args, max_waiting=server.max_waiting)
    proposer, words = await load_proposer(config)
    with observed(args) as observers:
        async with (
            connected(args) as channel,
            draft_worker(proposer, draft, words, continuing(channel, observers.telemetry)) as (worker, engine),
        ):
            name, tokenizer = await _as_target(channel, draft.target_address, config.tokenizer_path)
            metrics = Metrics(name)
            return await _serve_generation(
                _generation(worker, tokenizer, name, "distributed", observers, metrics),
                args,
                server,
                engine,
                metrics,
                observers,
                upstream=channel,
            )


async def _as_target(channel: grpc.aio.Channel, where: str, path: Path) -> tuple[str, Tokenizer]:
    """The target's name, and the draft's tokenizer with the target's chat template.

    A target that only verifies says neither.
    """
    try:
        card = ModelCard.from_message(await RemoteCompleter(channel, where, deadline_s=CARD_TIMEOUT_S).model())
    except SpecDecError:
        return f"target of {where}", Tokenizer.load(path)
    return card.name, Tokenizer.load_for(path, card.chat_template)


def _addresses(text: str) -> list[str]:
    """The targets of --attach."""
    addresses = [where.strip() for where in text.split(",")]
    for where in addresses:
        host, _, port = where.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--attach {text}: {where!r} is not HOST:PORT")
    return addresses


async def assist_targets(args: argparse.Namespace, config: ProposerConfig) -> int:
    """Draft for the targets that --attach names, until a signal."""
    addresses = _addresses(args.attach)
    if args.profile:
        raise ConfigError("--profile with --attach: the requests live at the target; profile them there")
    proposer, words = await load_proposer(config)
    async with running(DraftEngine(proposer, max_waiting=0)) as engine:
        helping = asyncio.create_task(
            assist(
                engine,
                addresses,
                vocabulary=words,
                gamma=check_gamma(args.gamma),
                num_slots=config.num_slots,
            )
        )
        stopping = asyncio.create_task(stop_signal())
        with traced(args, engine):
            await asyncio.wait([helping, stopping], return_when=asyncio.FIRST_COMPLETED)
        if helping.done():
            helping.result()
        helping.cancel()
        await asyncio.gather(helping, return_exceptions=True)
    logger.info("stopped")
    return 0


def _generation(
    generator: Generator,
    tokenizer: Tokenizer,
    name: str,
    topology: str,
    observers: Observers,
    metrics: Metrics,
) -> GenerationServicer:
    completer = observers.around(LocalCompleter(generator, tokenizer), metrics, model=name)
    limits = (generator.max_length, generator.vocab_size)
    card = ModelCard(name, topology, *limits, tokenizer.fingerprint, tokenizer.chat_template)
    return GenerationServicer(completer, card)


async def _serve_generation(
    servicer: GenerationServicer,
    args: argparse.Namespace,
    config: ServerConfig,
    engine: Engine[Any, Any, Any],
    metrics: Metrics,
    observers: Observers,
    *,
    upstream: grpc.aio.Channel | None = None,
) -> int:
    def register(grpc_server: grpc.aio.Server) -> None:
        rpc.add_GenerationServiceServicer_to_server(servicer, grpc_server)

    return await _until_signal(
        args, config, [generation.SERVICE_NAME], register, engine, servicer, metrics, observers, upstream=upstream
    )


async def _until_signal(
    args: argparse.Namespace,
    config: ServerConfig,
    names: list[str],
    register: Callable[[grpc.aio.Server], None],
    engine: Engine[Any, Any, Any],
    service: GenerationServicer,
    metrics: Metrics,
    observers: Observers,
    *,
    upstream: grpc.aio.Channel | None = None,
) -> int:
    where, telemetry = address(config.host, config.port), observers.telemetry
    spans = [] if telemetry is None else [SpanInterceptor(telemetry.serving)]
    try:
        server = Server(
            where, service_names=names, register=register, status_of=to_status, inner=spans, upstream=upstream
        )
    except PortTakenError as exc:
        raise ConfigError(str(exc)) from exc
    metrics.watch(engine)
    async with beside_grpc(args, service, metrics, config, telemetry) as http:
        with traced(args, engine):
            await _serve_until_signal(server, config, engine, http)
    logger.info("stopped")
    return 0


async def _serve_until_signal(
    server: Server, config: ServerConfig, engine: Engine[Any, Any, Any], http: HttpServer | None
) -> None:
    await server.start()
    logger.info("serving on %s", address(config.host, server.port))
    signal = await stop_signal()
    logger.info("%s: running requests get %g s", signal.name, config.grace_s)
    if http is not None:
        http.refuse_new()
    await server.stop(lambda: engine.stop(grace_s=config.grace_s), grace_s=1.0)
