"""The life of a draft worker that serves: at the edge for clients, or in the pool for targets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inference.config import (
    DialSecurity,
    DraftConfig,
    HttpConfig,
    ObserveConfig,
    ProposerConfig,
    ServerConfig,
    model_name,
)
from inference.observe.metrics import Metrics
from inference.request import NO_DEFAULTS
from inference.serving.assembly import draft_engine, draft_worker, load_proposer, model_card, running
from inference.serving.behind import TargetBehind
from inference.serving.fronts import Ports
from inference.serving.host import Host
from inference.serving.observers import Observers, observed, timeline
from inference.text.tokenizer import Tokenizer
from inference.workers.completion import ModelCard
from inference.workers.dialling import credentials_of
from inference.workers.draft.pool_member import Offer, PoolHelp
from inference.workers.draft.worker import DraftWorker
from inference.workers.fleet import connected
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.operation import Operation
from inference.workers.remote import card_of_target

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
        IncompatibleDraftError: what answers is no target.
    """
    ports = Ports(server, observe, http)
    with observed(observe) as observers:
        async with connected(draft.connection, observers.headers) as fleet:
            await card_of_target(fleet)  # before a model is loaded for minutes
            loaded = await load_proposer(proposer)
            behind = TargetBehind(fleet, loaded.vocabulary)
            behind.card = await behind.ask()
            async with draft_worker(loaded, draft, fleet) as (worker, engine):
                card = behind.card or model_card(
                    f"target of {fleet.label}", "target", worker, loaded.tokenizer, NO_DEFAULTS
                )
                metrics = Metrics(card.name, role="draft")
                metrics.watch(engine)
                operation = Operation(engine, may_drain=server.ends_by_call)
                face = _Face(worker, loaded.tokenizer, proposer.tokenizer_path, operation)
                generation = await face.of(card, observers, metrics)

                async def adopt(card: ModelCard) -> None:
                    await face.show(card)
                    ports.show(generation.card)

                fronts = ports.fronts(observers, metrics, [generation], behind.is_serving, behind.follow(adopt))
                with timeline(observe, engine):
                    await Host(engine, fronts, config=server, metrics=metrics, operation=operation).run()


class _Face:
    """What clients see: the target's name and defaults, so that an answer does not depend on whom they asked.

    Args:
        worker: answers.
        tokenizer: of the draft, in the directory `path`.
        operation: of the server.
    """

    def __init__(self, worker: DraftWorker, tokenizer: Tokenizer, path: Path, operation: Operation) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._path = path
        self._operation = operation
        self._local = LocalCompleter(worker, tokenizer)

    async def of(self, card: ModelCard, observers: Observers, metrics: Metrics) -> GenerationServicer:
        """The service, for the target of this card."""
        completer = observers.around(self._local, metrics, model=card.name)
        self._generation = GenerationServicer(completer, card, self._local.codec, self._operation)
        await self.show(card)
        return self._generation

    async def show(self, target: ModelCard) -> None:
        """Stand for this target from now on; conversations are written as its chat template says.

        Raises:
            ConfigError: its chat template is too long.
        """
        tokenizer = await asyncio.to_thread(self._tokenizer.with_template, target.chat_template, self._path)
        self._local.stand_for(tokenizer, target.defaults, target.model_id)
        about = (target.defaults, target.model_id)
        self._generation.card = model_card(target.name, "distributed", self._worker, tokenizer, *about)
        logger.info("the target serves %s", target.name)


async def help_targets(
    proposer: ProposerConfig,
    targets: Sequence[str],
    server: ServerConfig,
    observe: ObserveConfig,
    *,
    gamma: int,
    security: DialSecurity,
    tells_health: bool,
) -> None:
    """Draft for the sessions of targets until a signal; this worker's health is told if somebody asks for it.

    Raises:
        ConfigError: the draft cannot be loaded, a port is taken, or a file of `security` cannot be used.
        RequestError: every target refuses this worker.
    """
    config = replace(server, grace_s=0.0, drain_delay_s=0.0)
    ports = Ports(config, observe)
    credentials_of(security)
    loaded = await load_proposer(proposer)
    metrics = Metrics(model_name(proposer.tokenizer_path), role="draft")
    with observed(observe) as observers:
        async with running(draft_engine(loaded, max_waiting=0)) as engine:
            metrics.watch(engine)
            offer = Offer(loaded.vocabulary, gamma, proposer.num_slots, security)
            pool_help = PoolHelp(engine, targets, offer, metrics)
            fronts = ports.fronts(observers, metrics, []) if tells_health else ports.side_fronts(observers, metrics)
            with timeline(observe, engine):
                await Host(pool_help, fronts, config=config, metrics=metrics).run(until=pool_help.refused())
