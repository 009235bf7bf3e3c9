"""Puts a worker's parts together: model, decoder, engine. Each function is a context that stops what it started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import grpc

from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from inference.backends.registry import load_backend, load_decoder
from inference.config import DraftConfig, ModelConfig, ProposerConfig
from inference.engine.draft import DraftEngine
from inference.engine.target import MAX_PASS_DRAFT_TOKENS, EngineLimits, TargetEngine
from inference.model import (
    Backend,
    CompiledDecoder,
    Proposer,
    Span,
    max_pass_draft_tokens,
)
from inference.scheduling.draft_length import DraftLength
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.ngram import MAX_NGRAM_LENGTH, NgramProposer
from inference.speculation.slot_decoder import SlotDecoder
from inference.speculation.speculative_decoder import SpeculativeDecoder
from inference.text.tokenizer import Tokenizer, model_vocab_size
from inference.text.vocabulary import Vocabulary, require_one_vocabulary
from inference.workers.draft.worker import DraftWorker

logger = logging.getLogger(__name__)


@asynccontextmanager
async def target_engine(config: ModelConfig, *, max_waiting: int) -> AsyncGenerator[TargetEngine, None]:
    """A running engine over one model."""
    backend = await load(config)
    eos = Tokenizer.load(config.path).eos_token_ids
    limits = EngineLimits(max_waiting, max_pass_draft_tokens(backend, MAX_PASS_DRAFT_TOKENS), eos)
    async with running(TargetEngine(SlotDecoder(backend), limits)) as engine:
        yield engine


@asynccontextmanager
async def fused_engine(
    target: ModelConfig, draft: ProposerConfig, *, max_waiting: int, gamma: int, length: DraftLength | None
) -> AsyncGenerator[TargetEngine, None]:
    """A running engine over a target and a proposer.

    Args:
        gamma: draft tokens of one session in one pass at most.
        length: chooses how many; without it, and in a compiled graph, it is always gamma.

    Raises:
        IncompatibleDraftError: they do not share a vocabulary.
    """
    tokenizer = Tokenizer.load(target.path)
    limits = EngineLimits(max_waiting, gamma, tokenizer.eos_token_ids)
    compiled = None if draft.model is None else await _load_compiled(target, draft.model)
    if compiled is not None:
        async with running(TargetEngine(compiled, limits)) as engine:
            yield engine
        return
    backend = await load(target)
    proposer, draft_words = await load_proposer(draft)
    require_one_vocabulary(draft_words, Vocabulary(tokenizer.fingerprint, backend.vocab_size))
    decoder = SpeculativeDecoder(SlotDecoder(backend), proposer, length)
    async with running(TargetEngine(decoder, limits)) as engine:
        yield engine


async def load_proposer(config: ProposerConfig) -> tuple[Proposer, Vocabulary]:
    """Load what drafts, and the vocabulary it drafts in."""
    fingerprint = Tokenizer.load(config.tokenizer_path).fingerprint
    if config.model is None:
        lookup = NgramProposer(num_slots=config.num_slots, max_length=MAX_NGRAM_LENGTH)
        return lookup, Vocabulary(fingerprint, model_vocab_size(config.tokenizer_path))
    num_slots = config.num_slots * (1 + config.branches)
    backend = await load(replace(config.model, num_slots=num_slots))
    proposer = ModelProposer(backend, num_branches=config.branches)
    if config.branches:
        _log_branches(proposer, num_slots - config.num_slots)
    return proposer, Vocabulary(fingerprint, backend.vocab_size)


def _log_branches(proposer: ModelProposer, num_branch_slots: int) -> None:
    if proposer.num_branches:
        logger.info("%d of the slots are for branches, %d per sequence", num_branch_slots, proposer.num_branches)
    else:
        logger.warning("no branches: this backend cannot fork a slot")


async def _load_compiled(target: ModelConfig, draft: ModelConfig) -> CompiledDecoder | None:
    """Both models in one graph, if their backend has that and the configuration wants it.

    Raises:
        IncompatibleDraftError: they do not share a vocabulary.
    """
    started = time.monotonic()
    decoder = await asyncio.to_thread(load_decoder, target, draft)
    if decoder is not None:
        if (draft.path / "tokenizer.json").is_file():  # an EAGLE draft may have none of its own
            words = Vocabulary(Tokenizer.load(draft.path).fingerprint, model_vocab_size(draft.path))
            require_one_vocabulary(words, Vocabulary(Tokenizer.load(target.path).fingerprint, decoder.vocab_size))
        _log_ready(target, decoder, started)
    return decoder


EngineT = TypeVar("EngineT", TargetEngine, DraftEngine)


@asynccontextmanager
async def running(engine: EngineT) -> AsyncGenerator[EngineT, None]:
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def draft_worker(
    proposer: Proposer, draft: DraftConfig, words: Vocabulary, channel: grpc.aio.Channel
) -> AsyncGenerator[tuple[DraftWorker, DraftEngine], None]:
    """A running draft engine, and the worker that joins it to the target at the channel's other end."""
    async with running(DraftEngine(proposer, max_waiting=draft.max_waiting)) as engine:
        stub = rpc.VerificationServiceStub(channel)
        yield DraftWorker(engine, stub, config=draft, vocabulary=words, max_length=proposer.max_length), engine


async def load(config: ModelConfig) -> Backend:
    """Load a model off the event loop, run one pass to warm it up, and say what it takes."""
    started = time.monotonic()
    backend = await asyncio.to_thread(load_backend, config)
    await asyncio.to_thread(backend.forward, [Span(slot=0, start=0, token_ids=[0], num_logits=1)])
    _log_ready(config, backend, started)
    return backend


def _log_ready(config: ModelConfig, backend: Backend | CompiledDecoder, started: float) -> None:
    logger.info(
        "model %s: %d slots of %d tokens, %.1f MB each, ready in %.1f s",
        config.path.name,
        backend.num_slots,
        backend.max_length,
        backend.slot_bytes / 1e6,
        time.monotonic() - started,
    )
