"""The life of a draft worker that serves: at the edge for clients, or in the pool for targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inference.config import DraftConfig, HttpConfig, ObserveConfig, ProposerConfig, ServerConfig, model_name
from inference.observe.metrics import Metrics
from inference.request import NO_DEFAULTS
from inference.serving.assembly import draft_engine, draft_worker, load_proposer, model_card, running
from inference.serving.fronts import GrpcFront, check_ports, http_fronts, metrics_fronts
from inference.serving.host import Front, Host
from inference.serving.observers import Observers, observed, timeline
from inference.text.tokenizer import Tokenizer
from inference.workers.completion import ModelCard
from inference.workers.draft.pool_member import Offer, PoolHelp
from inference.workers.draft.worker import DraftWorker
from inference.workers.fleet import connected
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.remote import card_of_target


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
    check_ports(server, observe, http)
    with observed(observe) as observers:
        async with connected(draft.connection, observers.opening) as fleet:
            card = await card_of_target(fleet)
            loaded = await load_proposer(proposer)
            async with draft_worker(loaded, draft, fleet) as (worker, engine):
                tokenizer = loaded.tokenizer
                if card is None:
                    card = model_card(f"target of {fleet.label}", "target", worker, tokenizer, NO_DEFAULTS)
                else:  # conversations are written as the target's chat template says
                    tokenizer = tokenizer.with_template(card.chat_template, proposer.tokenizer_path)
                metrics = Metrics(card.name, role="draft")
                metrics.watch(engine)
                generation = _generation(worker, tokenizer, card, metrics, observers)
                fronts: list[Front] = [
                    *metrics_fronts(observers, metrics, server),
                    *http_fronts(http, generation, metrics, server, observers),
                    GrpcFront(server, [generation], observers, upstream=fleet.serves()),
                ]
                with timeline(observe, engine):
                    await Host(engine, fronts, config=server, metrics=metrics).run()


def _generation(
    worker: DraftWorker, tokenizer: Tokenizer, target: ModelCard, metrics: Metrics, observers: Observers
) -> GenerationServicer:
    """What clients ask: the target's name and defaults, so that an answer does not depend on whom they asked."""
    local = LocalCompleter(worker, tokenizer, target.defaults, model_id=target.model_id)
    completer = observers.around(local, metrics, model=target.name)
    card = model_card(target.name, "distributed", worker, tokenizer, target.defaults, model_id=target.model_id)
    return GenerationServicer(completer, card, local.codec)


async def help_targets(
    proposer: ProposerConfig,
    addresses: Sequence[str],
    server: ServerConfig | None,
    observe: ObserveConfig,
    *,
    gamma: int,
) -> None:
    """Draft for the sessions of targets until a signal; `server` answers for this worker's health.

    Raises:
        ConfigError: the draft cannot be loaded, or a port is taken.
        RequestError: every target refuses this worker.
    """
    config = replace(server or ServerConfig(port=0), grace_s=0.0, drain_delay_s=0.0)
    check_ports(config, observe)
    loaded = await load_proposer(proposer)
    metrics = Metrics(model_name(proposer.tokenizer_path), role="draft")
    with observed(observe) as observers:
        async with running(draft_engine(loaded, max_waiting=0)) as engine:
            metrics.watch(engine)
            pool_help = PoolHelp(engine, addresses, Offer(loaded.vocabulary, gamma, proposer.num_slots), metrics)
            fronts: list[Front] = [*metrics_fronts(observers, metrics, config)]
            if server is not None:
                fronts.append(GrpcFront(config, [], observers))
            with timeline(observe, engine):
                await Host(pool_help, fronts, config=config, metrics=metrics).run(until=pool_help.refused())
