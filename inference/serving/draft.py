"""The life of a draft worker that serves: at the edge for clients, or in the pool for targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc

from inference.config import DraftConfig, ObserveConfig, ProposerConfig, ServerConfig
from inference.engine.draft import DraftEngine
from inference.errors import SpecDecError
from inference.observe.metrics import Metrics
from inference.serving.assembly import draft_worker, load_proposer, model_card, running
from inference.serving.fronts import GrpcFront, metrics_fronts
from inference.serving.host import Front, Host
from inference.serving.observers import Observers, observed, timeline
from inference.text.tokenizer import Tokenizer
from inference.workers.draft.pool_member import PoolHelp
from inference.workers.draft.worker import DraftWorker
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.remote import RemoteCompleter, connected

CARD_TIMEOUT_S = 5.0


async def serve_draft(
    proposer: ProposerConfig, draft: DraftConfig, server: ServerConfig, observe: ObserveConfig
) -> None:
    """Serve clients with a local draft and a remote target, until a signal.

    Raises:
        ConfigError: the draft cannot be loaded, or a port is taken.
        UnavailableError: the target does not answer.
    """
    loaded = await load_proposer(proposer)
    with observed(observe) as observers:
        async with (
            connected(draft.connection) as channel,
            draft_worker(loaded, draft, observers.continuing(channel)) as (worker, engine),
        ):
            name, tokenizer = await _as_target(
                channel, draft.connection.address, loaded.tokenizer, proposer.tokenizer_path
            )
            metrics = Metrics(name)
            metrics.watch(engine)
            generation = _generation(worker, tokenizer, name, metrics, observers)
            grpc_front = GrpcFront(server, [generation], observers, upstream=channel)
            fronts: list[Front] = [*metrics_fronts(observers, metrics, server), grpc_front]
            with timeline(observe, engine):
                await Host(engine, fronts, grace_s=server.grace_s).run()


def _generation(
    worker: DraftWorker, tokenizer: Tokenizer, name: str, metrics: Metrics, observers: Observers
) -> GenerationServicer:
    completer = observers.around(LocalCompleter(worker, tokenizer), metrics, model=name)
    return GenerationServicer(completer, model_card(name, "distributed", worker, tokenizer))


async def _as_target(channel: grpc.aio.Channel, address: str, own: Tokenizer, path: Path) -> tuple[str, Tokenizer]:
    """The target's name, and the draft's tokenizer with the target's chat template.

    A target that only verifies says neither.
    """
    try:
        card = await RemoteCompleter(channel, address, deadline_s=CARD_TIMEOUT_S).model()
    except SpecDecError:
        return f"target of {address}", own
    return card.name, own.with_template(card.chat_template, path)


async def help_targets(
    proposer: ProposerConfig, addresses: Sequence[str], *, gamma: int, observe: ObserveConfig
) -> None:
    """Draft for the sessions of targets until a signal.

    Raises:
        ConfigError: the draft cannot be loaded.
        RequestError: every target refuses this worker.
    """
    loaded = await load_proposer(proposer)
    slots, words = proposer.num_slots, loaded.vocabulary
    async with running(DraftEngine(loaded.proposer, max_waiting=0)) as engine:
        pool_help = PoolHelp(engine, addresses, vocabulary=words, gamma=gamma, num_slots=slots)
        with timeline(observe, engine):
            await Host(pool_help, grace_s=0.0).run(until=pool_help.refused())
