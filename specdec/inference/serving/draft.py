"""Life cycle of a draft worker that serves: at the edge for clients, or in the pool for targets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from specdec.inference.config import (
    DialSecurity,
    DraftConfig,
    HttpConfig,
    ObserveConfig,
    ProposerConfig,
    ServerConfig,
    model_name,
)
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.errors import IncompatibleDraftError, SpecDecError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.assembly import (
    LoadedDraft,
    draft_engine,
    load_proposer,
    private_worker,
    reader_of,
    running,
)
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.host import Host
from specdec.inference.serving.observers import observed, timeline
from specdec.inference.text.vocabulary import Vocabulary, require_one_vocabulary
from specdec.inference.workers.calls.dialling import credentials_of
from specdec.inference.workers.calls.fleet import Fleet, connected
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer, Operation
from specdec.inference.workers.completing.remote import DISTRIBUTED, card_of_target
from specdec.inference.workers.completing.writing import TextCompleter
from specdec.inference.workers.completion import ModelCard
from specdec.inference.workers.drafting.pool_worker import DraftWork, PoolWorker
from specdec.inference.workers.drafting.private import PrivateWorker
from specdec.inference.workers.drafting.stream import Offer

logger = logging.getLogger(__name__)


async def serve_draft(
    proposer: ProposerConfig,
    draft: DraftConfig,
    server: ServerConfig,
    http: HttpConfig | None,
    observe: ObserveConfig,
) -> None:
    """Serve clients with a local draft and a remote target, until a signal.

    Raises:
        ConfigError: the draft cannot be loaded, or a port is taken.
        UnavailableError: no target answers.
        IncompatibleDraftError: the server that answers is no target.
    """
    ports = Ports(server, observe, http)
    with observed(observe) as observers:
        async with connected(draft.connection, observers.headers) as fleet:
            await card_of_target(fleet)  # before a model is loaded for minutes
            loaded = await load_proposer(proposer)
            upstream = UpstreamTarget(fleet, loaded.vocabulary)
            card = upstream.card = await upstream.ask()
            async with private_worker(loaded, draft, fleet, card) as (worker, engine):
                remote = FailoverCompleter(fleet, draft.connection, worker)
                texts = TextCompleter(remote, lambda: worker.reader.tokenizer)
                name = fleet.label if card is None else card.name
                metrics = Metrics(name, role="draft")
                completer = observers.around(texts, metrics, model=name)
                work = EdgeWork(completer, engine)
                metrics.watch(work)
                metrics.watch_graphs([loaded.model])
                metrics.watch_vocabulary(lambda: worker.vocabulary_share)
                metrics.watch_undrafted(lambda: worker.num_undrafted)
                operation = Operation(work, may_drain=server.ends_by_call)
                service = GenerationServicer(completer, _edge_card(card, loaded), remote, operation)
                switch = partial(_switch_model, loaded, worker, service, proposer.tokenizer_path, ports)
                if card is not None:
                    await switch(card)
                fronts = ports.fronts(observers, metrics, [service], upstream.is_serving, upstream.follow(switch))
                with timeline(observe, engine):
                    await Host(work, fronts, config=server, metrics=metrics, operation=operation).run()


class EdgeWork(DraftWork):
    """Work of a draft worker that serves clients: requests, which run at the target, and an engine that drafts."""

    def __init__(self, completer: SupervisedCompleter, engine: DraftEngine) -> None:
        super().__init__(engine)
        self._completer = completer
        self.num_slots = engine.num_slots

    @property
    def num_running(self) -> int:
        """Number of requests that have started, with or without drafts."""
        return self._completer.num_running

    @property
    def num_waiting(self) -> int:
        return self._completer.num_waiting

    async def stop(self, *, grace_s: float) -> None:
        """Take no new requests; let running ones, for which the engine still drafts, finish for `grace_s` seconds."""
        await self._completer.stop(grace_s=grace_s)


def _edge_card(card: ModelCard | None, draft: LoadedDraft) -> ModelCard:
    """Return the card that a draft worker shows its clients: the target's, or its own while the former is unknown."""
    if card is not None:
        return replace(card, topology=DISTRIBUTED)
    words, length, own = draft.vocabulary, draft.proposer.max_length, draft.tokenizer
    sizes = length, words.size, words.fingerprint
    return ModelCard("target", DISTRIBUTED, *sizes, own.chat_template, call_format=own.call_format())


async def _switch_model(
    draft: LoadedDraft,
    worker: PrivateWorker,
    service: GenerationServicer,
    path: Path,
    ports: Ports,
    target: ModelCard,
) -> None:
    """Serve `target` from now on, under its name; the draft worker reads requests with its chat template and defaults.

    Args:
        path: directory of the draft's tokenizer.

    Raises:
        ConfigError: the chat template is too long.
    """
    words = await asyncio.to_thread(draft.tokenizer.with_template, target.chat_template, path)
    worker.reader = reader_of(draft, target, words)
    service.card = _edge_card(target, draft)
    ports.show(service.card)
    logger.info("the target serves %s", target.name)


class UpstreamTarget:
    """Target at a fleet's addresses, which another model may replace at any time.

    Attributes:
        card: card of the model that it served last; None if it gives none.
    """

    def __init__(self, fleet: Fleet, vocabulary: Vocabulary) -> None:
        self._fleet = fleet
        self._vocabulary = vocabulary  # of the draft
        self.card: ModelCard | None = None
        self._serves = True  # it has been reached at start
        self._fault = ""  # reason why it cannot be used, as logged

    async def ask(self) -> ModelCard | None:
        """Request the target's model card and check that its vocabulary is the draft's.

        Return None if the target has no card, or does not answer.

        Raises:
            IncompatibleDraftError: the server is no target, or has another vocabulary.
        """
        card = await card_of_target(self._fleet)
        if card is not None:
            require_one_vocabulary(self._vocabulary, Vocabulary(card.tokenizer_fingerprint, card.vocab_size))
        return card

    async def follow(self, switch_model: Callable[[ModelCard], Awaitable[None]]) -> AsyncGenerator[bool, None]:
        """Yield whether the target serves and the draft fits it, now and at each change, without end.

        Args:
            switch_model: called first with the target's card, if that has changed.
        """
        async with aclosing(self._fleet.serves()) as changes:
            async for serves in changes:
                self._serves = serves and await self._fits(switch_model)
                yield self._serves

    async def _fits(self, switch_model: Callable[[ModelCard], Awaitable[None]]) -> bool:
        fault, may_change = "", True
        try:
            card = await self.ask()
            if card is not None and card != self.card:
                await switch_model(card)
                self.card = card
            may_change = card is None  # it did not answer, and may serve another model
        except SpecDecError as exc:
            fault = str(exc)
            if fault != self._fault:
                logger.error("not ready until another target is at %s: %s", self._fleet.label, exc)
            may_change = not isinstance(exc, IncompatibleDraftError)  # such as a token that it does not accept now
        if may_change:
            self._fleet.look_again()
        self._fault = fault
        return not fault

    async def is_serving(self) -> bool:
        """Return the latest value that `follow` yielded."""
        return self._serves


async def help_targets(
    proposer: ProposerConfig,
    targets: Sequence[str],
    server: ServerConfig,
    observe: ObserveConfig,
    *,
    gamma: int,
    security: DialSecurity,
    reports_health: bool,
) -> None:
    """Draft for the sessions of targets until a signal; `reports_health` opens a port for the worker's health.

    Raises:
        ConfigError: the draft cannot be loaded, a port is taken, or a file of `security` cannot be used.
        RequestError: every target refuses this worker.
    """
    config = replace(server, grace_s=0.0, drain_delay_s=0.0)
    ports = Ports(config, observe)
    credentials_of(security)
    loaded = await load_proposer(proposer)
    metrics = Metrics(model_name(proposer.model.path if proposer.model else proposer.tokenizer_path), role="draft")
    with observed(observe) as observers:
        async with running(draft_engine(loaded, max_waiting=0)) as engine:
            metrics.watch(engine)
            metrics.watch_graphs([loaded.model])
            learn = None if loaded.own is None else loaded.words_of
            offer = Offer(loaded.vocabulary, gamma, proposer.num_slots, security, learn)
            worker = PoolWorker(engine, targets, offer, metrics)
            metrics.watch_vocabulary(lambda: worker.vocabulary_share)
            fronts = ports.fronts(observers, metrics, []) if reports_health else ports.side_fronts(observers, metrics)
            with timeline(observe, engine):
                await Host(worker, fronts, config=config, metrics=metrics).run(until=worker.refused())
