"""Puts a worker's parts together: model, decoder, engine. Each function is a context that stops what it started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc

from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.backends.registry import load_backend
from inference.config import DraftConfig, ModelConfig
from inference.engine.drafting import DraftEngine
from inference.engine.target import TargetEngine
from inference.speculation.decoder import SlotDecoder
from inference.speculation.proposer import ModelProposer
from inference.tokenizer import Tokenizer
from inference.types import Backend, Span
from inference.workers.draft import DraftWorker
from inference.workers.verifier import Vocabulary

logger = logging.getLogger(__name__)


@asynccontextmanager
async def target_engine(config: ModelConfig, *, max_waiting: int) -> AsyncGenerator[TargetEngine, None]:
    """A running engine over one model."""
    backend = await load(config)
    engine = TargetEngine(
        SlotDecoder(backend),
        num_slots=backend.num_slots,
        max_length=backend.max_length,
        vocab_size=backend.vocab_size,
        max_waiting=max_waiting,
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def draft_worker(
    config: ModelConfig, draft: DraftConfig, tokenizer: Tokenizer, channel: grpc.aio.Channel
) -> AsyncGenerator[tuple[DraftWorker, DraftEngine], None]:
    """A running draft engine, and the worker that joins it to the target at the channel's other end."""
    backend = await load(config)
    engine = DraftEngine(ModelProposer(backend), max_waiting=draft.max_waiting)
    worker = DraftWorker(
        engine,
        rpc.VerificationServiceStub(channel),
        config=draft,
        vocabulary=Vocabulary(tokenizer.fingerprint, backend.vocab_size),
        max_length=backend.max_length,
    )
    engine.start()
    try:
        yield worker, engine
    finally:
        await engine.stop()


async def load(config: ModelConfig) -> Backend:
    """Load a model off the event loop, run one pass to warm it up, and say what it takes."""
    started = time.monotonic()
    backend = await asyncio.to_thread(load_backend, config)
    await asyncio.to_thread(backend.forward, [Span(slot=0, start=0, token_ids=[0], num_logits=1)])
    logger.info(
        "model %s: %d slots of %d tokens, %.1f MB each, ready in %.1f s",
        config.path.name,
        backend.num_slots,
        backend.max_length,
        backend.slot_bytes / 1e6,
        time.monotonic() - started,
    )
    return backend
