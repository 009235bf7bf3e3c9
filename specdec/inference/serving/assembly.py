"""Assembly of a server's parts: loads models, and makes decoders and engines of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from specdec.inference.backends.identity import model_id_of
from specdec.inference.backends.registry import has_fixed_slots, load_backend, load_decoder
from specdec.inference.commit import TokenSource
from specdec.inference.config import (
    FusedConfig,
    ModelConfig,
    ProposerConfig,
    usable_cores,
)
from specdec.inference.engine.contract import SessionT, VerificationEngine
from specdec.inference.engine.draft import DraftEngine, TargetWords
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import MAX_PASS_DRAFT_TOKENS, EngineLimits, TargetEngine
from specdec.inference.errors import IncompatibleDraftError
from specdec.inference.model.decoder import CompiledDecoder, Decoder
from specdec.inference.model.proposer import Proposer
from specdec.inference.model.slots import Backend, PrefixKeeper, Span, max_pass_draft_tokens
from specdec.inference.model.token_map import SAME_IDS, TokenMap
from specdec.inference.observe.metrics import Metrics, SlotLoad
from specdec.inference.request import MAX_GAMMA, Noise, RequestDefaults, SamplingParams
from specdec.inference.sampling.choice import choose_tokens
from specdec.inference.scheduling.draft_length import DraftLength
from specdec.inference.serving.host import Work
from specdec.inference.serving.observers import Timed
from specdec.inference.speculation.lookup import MAX_NGRAM_LENGTH, NgramProposer
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder, decide
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary, require_one_vocabulary, token_map
from specdec.inference.workers.completion import ModelCard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Loaded source of draft tokens, a draft model or prompt lookup, for targets that all have the same tokenizer.

    Attributes:
        proposer: source of draft tokens.
        tokenizer: tokenizer of the targets, in whose token ids the draft reads and writes.
        vocabulary: vocabulary of these ids.
        prefix_caching: True if slots keep prefixes for later requests.
        token_map: map from the targets' token ids to the draft model's.
        own: the draft model's own tokenizer, and the number of rows of its output layer; None for prompt lookup.
        min_share: least share (0 to 1) of a target's tokens that the draft must have.
        num_threads: threads of the draft model; 0 for prompt lookup.
    """

    proposer: Proposer
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    prefix_caching: bool = True
    token_map: TokenMap = SAME_IDS
    own: tuple[Tokenizer, int] | None = None
    min_share: float = 0.0
    num_threads: int = 0

    def for_target(self, tokenizer: Tokenizer) -> LoadedDraft:
        """Return this draft for targets with the given tokenizer; a map for a large vocabulary takes a second to make.

        Raises:
            IncompatibleDraftError: the draft has too few of the targets' tokens, or is prompt lookup, not a model.
        """
        if self.own is None:
            raise IncompatibleDraftError(f"prompt lookup has tokenizer {self.tokenizer.fingerprint} alone")
        if tokenizer.fingerprint == self.own[0].fingerprint:
            words, joined = Vocabulary(tokenizer.fingerprint, self.own[1]), SAME_IDS
        else:
            joined = token_map(*self.own, tokenizer, min_share=self.min_share)
            words = Vocabulary(tokenizer.fingerprint, tokenizer.num_ids, joined.num_shared)
            logger.info("draft and target have two tokenizers: %d of %d ids are in both", words.num_shared, words.size)
        return replace(self, tokenizer=tokenizer, vocabulary=words, token_map=joined)

    def words_of(self, tokenizer: Tokenizer) -> TargetWords:
        """Return the vocabulary, the map of token ids and the compiler of grammars for targets with this tokenizer.

        Raises:
            IncompatibleDraftError: the draft has too few of the targets' tokens, or is prompt lookup, not a model.
        """
        draft = self.for_target(tokenizer)
        return TargetWords(draft.vocabulary, draft.token_map, draft.grammars)

    @property
    def grammars(self) -> Grammars:
        """Return a new compiler of grammars over the targets' tokens."""
        return Grammars(GrammarCompiler(self.tokenizer, self.vocabulary.size))

    @property
    def model(self) -> object:
        """Return the draft model's backend; None for prompt lookup."""
        return self.proposer.slots if isinstance(self.proposer, PrefixKeeper) else None


class ServedEngine(VerificationEngine[SessionT], SlotLoad, Work, Timed, Protocol[SessionT]):
    """Interface of the engine in a target's server: it verifies, reports load and faults, records steps, and drains."""


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """Running engine of a target, with its model's tokenizer and the facts that servers report about it.

    Attributes:
        arithmetic: name of the arithmetic on which logits depend besides the weights; a part of the model's id.
        vocabulary_share: share (0 to 1) of the target's ids that its draft can propose; None without a draft here.
        models: loaded models of target and draft, for metrics.
        collectors: functions that make further collectors of metrics, given the registry of this project's metrics.
        adapters: hash of each of the model's adapters (LoRA), by name.
        noise: rule by which a seed gives the random numbers of a choice of tokens (docs/noise.md), for all requests.
        num_threads: threads of the target model; 0: not known.
        lend: function that hands the pool of draft workers, and the metrics, to an engine whose requests come from
            `vllm serve`; None for other engines.
    """

    engine: ServedEngine[Any]
    tokenizer: Tokenizer
    arithmetic: str = ""
    vocabulary_share: float | None = None
    models: tuple[object, ...] = ()
    collectors: tuple[Callable[[CollectorRegistry], Collector], ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    noise: Noise = Noise.SPECDEC
    num_threads: int = 0
    lend: Callable[[DraftPool, Metrics], None] | None = None

    def model_id(self, model: ModelConfig) -> str:
        """Return the model's id: a hash of all that its tokens depend on, the same with and without a draft."""
        ends = f"{sorted(self.tokenizer.eos_token_ids)} {self.engine.max_length}"  # the context ends an output, too
        return model_id_of(model.path, self.arithmetic, ends)


@asynccontextmanager
async def target_engine(config: ModelConfig | FusedConfig, limits: EngineLimits) -> AsyncGenerator[RunningTarget, None]:
    """Load a target, or a target with its draft, and run an engine over them until the block ends.

    Args:
        limits: limits of requests and times. Those that follow from the models are replaced here. Its `num_spare` is a
            number of slots to add to those that the configuration has, if the backend can have more.

    Raises:
        IncompatibleDraftError: target and draft do not share a vocabulary.
    """
    model = target_of(config)
    num_spare = 0 if has_fixed_slots(model) else limits.num_spare
    loaded = await (
        _load_pair(config, num_spare) if isinstance(config, FusedConfig) else _load_alone(config, num_spare)
    )
    limits = replace(
        limits,
        gamma=loaded.gamma,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        prefix_caching=model.prefix_caching,
        num_spare=num_spare,
        width=min(loaded.width, MAX_GAMMA if loaded.gamma else 0),
    )
    compiler = GrammarCompiler(loaded.tokenizer, loaded.decoder.vocab_size)
    grammars = Grammars(compiler, num_places=limits.max_waiting + loaded.decoder.num_slots)
    await grammars.warm_up()
    async with running(TargetEngine(loaded.decoder, limits, grammars)) as engine:
        facts = loaded.tokenizer, loaded.arithmetic, loaded.vocabulary_share, loaded.models
        yield RunningTarget(engine, *facts, num_threads=_num_threads(model))


def target_of(config: ModelConfig | FusedConfig) -> ModelConfig:
    """Return the configuration of the target alone: `config` itself, or its target if `config` is of a pair."""
    return config.target if isinstance(config, FusedConfig) else config


@dataclass(frozen=True, slots=True)
class _LoadedTarget:
    """Loaded decoder of a target; fields that are not listed are those of `RunningTarget`.

    Attributes:
        decoder: decoder over the target, or over the target and its draft.
        gamma: most draft tokens of a sequence in one pass.
        width: most draft tokens of a sequence in one pass if they are looked up in a text that the output may repeat.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    arithmetic: str
    gamma: int
    vocabulary_share: float | None = None
    models: tuple[object, ...] = ()
    width: int = MAX_GAMMA


async def _load_alone(config: ModelConfig, num_spare: int) -> _LoadedTarget:
    if (compiled := await _load_compiled(config, None, gamma=0)) is not None:
        return compiled
    backend, tokenizer = await _load(_with_more_slots(config, num_spare))
    gamma, width = (max_pass_draft_tokens(backend, limit) for limit in (MAX_PASS_DRAFT_TOKENS, MAX_GAMMA))
    arithmetic = _arithmetic(config, backend)
    return _LoadedTarget(SlotDecoder(backend), tokenizer, arithmetic, gamma, models=(backend,), width=width)


async def _load_pair(config: FusedConfig, num_spare: int) -> _LoadedTarget:
    target, draft, gamma = config.target, config.draft, config.gamma
    if draft.model is not None and (compiled := await _load_compiled(target, draft.model, gamma=gamma)) is not None:
        return compiled
    backend, tokenizer = await _load(_with_more_slots(target, num_spare))
    drafting = await load_proposer(_with_more_slots(draft, num_spare))
    require_one_vocabulary(drafting.vocabulary, Vocabulary(tokenizer.fingerprint, backend.vocab_size))
    length = DraftLength() if config.adaptive_gamma else None
    decoder = SpeculativeDecoder(SlotDecoder(backend), drafting.proposer, length, drafting.token_map)
    share = drafting.vocabulary.share_of(backend.vocab_size)
    models = backend, drafting.model
    width = max_pass_draft_tokens(backend, MAX_GAMMA)
    return _LoadedTarget(decoder, tokenizer, _arithmetic(target, backend), gamma, share, models, width)


ConfigT = TypeVar("ConfigT", ModelConfig, ProposerConfig)


def _with_more_slots(config: ConfigT, num_spare: int) -> ConfigT:
    return replace(config, num_slots=config.num_slots + num_spare)


async def _load_compiled(target: ModelConfig, draft: ModelConfig | None, *, gamma: int) -> _LoadedTarget | None:
    """Load a target, or target and draft as one graph, with a decoder that the backend has compiled.

    Return None if the configuration asks for no compiled decoder.

    Args:
        gamma: draft tokens of a sequence in one pass of this decoder, for the result; 0 without a draft.

    Raises:
        IncompatibleDraftError: target and draft do not have the same vocabulary.
    """
    started = time.monotonic()
    decoder = await asyncio.to_thread(load_decoder, target, draft, decide)
    if decoder is None:
        return None
    tokenizer = Tokenizer.load(target.path)
    if draft is not None and (draft.path / "tokenizer.json").is_file():  # an EAGLE draft may have none of its own
        require_one_vocabulary(Vocabulary.of(draft.path), Vocabulary(tokenizer.fingerprint, decoder.vocab_size))
    _log_ready(target, decoder, started)
    return _LoadedTarget(decoder, tokenizer, _arithmetic(target, decoder), gamma, width=gamma)


def _arithmetic(config: ModelConfig, model: Backend | CompiledDecoder) -> str:
    """Return the name of the arithmetic on which logits depend besides the weights.

    The model reports this name; if it does not, the name is made of the settings.
    """
    settings = f"{config.backend} {config.dtype} {config.device} {config.neuron}"
    return str(getattr(model, "arithmetic", settings + (" exact" if config.exact == "always" else "")))


async def load_proposer(config: ProposerConfig) -> LoadedDraft:
    """Load a draft model, or prepare prompt lookup if the configuration names no model.

    Raises:
        IncompatibleDraftError: the draft has another tokenizer, and too few of the target's tokens.
    """
    model = config.model_with_branches
    if model is None:
        tokenizer = Tokenizer.load(config.tokenizer_path)
        lookup = NgramProposer(num_slots=config.num_slots, max_length=MAX_NGRAM_LENGTH)
        return LoadedDraft(lookup, tokenizer, Vocabulary.of(config.tokenizer_path))
    backend, tokenizer = await _load(model)
    proposer = ModelProposer(backend, num_branches=config.branches)
    if proposer.num_branches:
        num_shared = model.num_slots - config.num_slots
        logger.info("%d of the slots are for branches, %d per sequence", num_shared, proposer.num_branches)
    elif config.branches:
        logger.warning("no branches: this backend cannot fork a slot")
    words, own = Vocabulary(tokenizer.fingerprint, backend.vocab_size), (tokenizer, backend.vocab_size)
    caching, share = model.prefix_caching, config.min_vocabulary_share
    threads = _num_threads(model)
    loaded = LoadedDraft(proposer, tokenizer, words, caching, own=own, min_share=share, num_threads=threads)
    return loaded if config.tokenizer_path == model.path else loaded.for_target(Tokenizer.load(config.tokenizer_path))


def _num_threads(config: ModelConfig) -> int:
    return config.num_threads or usable_cores()


EngineT = TypeVar("EngineT", TargetEngine, DraftEngine)


@asynccontextmanager
async def running(engine: EngineT) -> AsyncGenerator[EngineT, None]:
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def draft_engine(draft: LoadedDraft, *, max_waiting: int) -> DraftEngine:
    """Return an engine over a loaded draft; the engine is not started yet.

    Args:
        max_waiting: most sessions that may wait for a slot.
    """
    return DraftEngine(
        draft.proposer,
        max_waiting=max_waiting,
        grammars=draft.grammars,
        prefix_caching=draft.prefix_caching,
        token_map=draft.token_map,
    )


async def _load(config: ModelConfig) -> tuple[Backend, Tokenizer]:
    """Load a model's tokenizer, then in a thread the model itself, and warm the model up.

    The tokenizer comes first, so that no two threads import at a time. An import of onnx adds to a dictionary of numpy;
    if an import of numpy.ma iterates over it meanwhile, the start fails with "dictionary changed size".
    """
    started = time.monotonic()
    tokenizer = Tokenizer.load(config.path)
    backend = await asyncio.to_thread(load_backend, config)
    await asyncio.to_thread(_warm_up, backend)
    _log_ready(config, backend, started)
    return backend, tokenizer


def _warm_up(backend: Backend) -> None:
    """Run one pass and choose a token, so that the first request does not wait for what is set up at first use."""
    logits = backend.forward([Span(slot=0, start=0, token_ids=[0], num_logits=1)])
    choose_tokens(logits, [SamplingParams()], [1])


def model_card(
    name: str, topology: str, source: TokenSource, tokenizer: Tokenizer, defaults: RequestDefaults, model_id: str = ""
) -> ModelCard:
    """Return the description of a served model, which clients get from GetModel; see `ModelCard`.

    Args:
        topology: kind of the server, such as "target".
        source: engine of the model, whose limits the description names.
        defaults: values for parameters that requests leave open.
    """
    limits, words = (source.max_length, source.vocab_size), (tokenizer.fingerprint, tokenizer.chat_template)
    card = ModelCard(name, topology, *limits, *words, defaults, model_id, text_fingerprint=tokenizer.text_fingerprint)
    return replace(card, call_format=tokenizer.call_format())


def _log_ready(config: ModelConfig, model: Backend | CompiledDecoder, started: float) -> None:
    logger.info(
        "model %s: %d slots of %d tokens, %.1f MB each, %d threads, ready in %.1f s",
        config.name,
        model.num_slots,
        model.max_length,
        model.slot_bytes / 1e6,
        config.num_threads,
        time.monotonic() - started,
    )
