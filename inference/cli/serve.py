"""Roles that serve until a signal: target, and draft with --serve."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from grpc_comm.options import address
from grpc_comm.server import PortTakenError, Server, stop_signal
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.cli.generate import connected, draft_config
from inference.config import ModelConfig, ServerConfig
from inference.engine.engine import Engine
from inference.errors import ConfigError
from inference.tokenizer import Tokenizer
from inference.types import Generator
from inference.workers import generation, verification
from inference.workers.assembly import draft_worker, target_engine
from inference.workers.completion import LocalCompleter
from inference.workers.generation import GenerationServicer, ModelCard
from inference.workers.status import to_status
from inference.workers.verification import VerificationServicer

logger = logging.getLogger(__name__)


async def serve_target(config: ModelConfig, server: ServerConfig) -> int:
    """Serve a target: verification for draft workers, and generation without any."""
    tokenizer = Tokenizer.load(config.path)
    async with target_engine(config, max_waiting=server.max_waiting) as engine:
        servicer = VerificationServicer(engine, fingerprint=tokenizer.fingerprint, idle_timeout_s=server.idle_timeout_s)
        generator = generation_servicer(engine, tokenizer, config.path, topology="target")

        def register(grpc_server: grpc.aio.Server) -> None:
            rpc.add_VerificationServiceServicer_to_server(servicer, grpc_server)
            rpc.add_GenerationServiceServicer_to_server(generator, grpc_server)

        names = [verification.SERVICE_NAME, generation.SERVICE_NAME]
        return await _serve_until_signal(server, names, register, engine)


async def serve_draft(args: argparse.Namespace, config: ModelConfig, server: ServerConfig) -> int:
    """Serve generation with a local draft and a remote target."""
    tokenizer = Tokenizer.load(config.path)
    draft = draft_config(args, max_waiting=server.max_waiting)
    async with connected(args) as channel, draft_worker(config, draft, tokenizer, channel) as (worker, engine):
        generator = generation_servicer(worker, tokenizer, config.path, topology="distributed")

        def register(grpc_server: grpc.aio.Server) -> None:
            rpc.add_GenerationServiceServicer_to_server(generator, grpc_server)

        return await _serve_until_signal(server, [generation.SERVICE_NAME], register, engine)


def generation_servicer(generator: Generator, tokenizer: Tokenizer, path: Path, *, topology: str) -> GenerationServicer:
    card = ModelCard(
        name=path.name,
        topology=topology,
        max_length=generator.max_length,
        vocab_size=generator.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
    return GenerationServicer(LocalCompleter(generator, tokenizer), card)


async def _serve_until_signal(
    config: ServerConfig,
    names: list[str],
    register: Callable[[grpc.aio.Server], None],
    engine: Engine,  # type: ignore[type-arg]
) -> int:
    try:
        server = Server(address(config.host, config.port), service_names=names, register=register, status_of=to_status)
    except PortTakenError as exc:
        raise ConfigError(str(exc)) from exc
    await server.start()
    logger.info("serving on %s", address(config.host, server.port))
    signal = await stop_signal()
    logger.info("%s: running requests get %g s", signal.name, config.grace_s)
    await server.stop(lambda: engine.stop(grace_s=config.grace_s), grace_s=1.0)
    logger.info("stopped")
    return 0
