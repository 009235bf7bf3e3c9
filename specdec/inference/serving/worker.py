"""Life cycle of a draft worker in the pools of targets, which drafts for the requests that the targets assign to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.inference.config import DialSecurity, ObserveConfig, ProposerConfig, ServerConfig, model_name
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.assembly import draft_engine, load_proposer, running
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.host import Host
from specdec.inference.serving.observers import observed, timeline
from specdec.inference.workers.calls.dialling import credentials_of
from specdec.inference.workers.drafting.pool_worker import PoolWorker
from specdec.inference.workers.drafting.stream import Offer


async def serve_worker(
    proposer: ProposerConfig,
    targets: Sequence[str],
    server: ServerConfig,
    observe: ObserveConfig,
    *,
    gamma: int,
    security: DialSecurity,
) -> None:
    """Draft for requests of the given targets until a signal. The gRPC port, if there is one, only reports health.

    Args:
        proposer: the draft model, or prompt lookup.
        targets: addresses of the targets.
        gamma: most draft tokens of a request in a pass.
        security: certificates and token for the targets.

    Raises:
        ConfigError: the draft cannot be loaded, a port is taken, or a file of `security` cannot be used.
        RequestError, HandshakeError: no target can be used.
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
            offer = Offer(loaded.vocabulary, gamma, proposer.num_slots, security, learn, loaded.num_threads)
            worker = PoolWorker(engine, targets, offer, metrics)
            metrics.watch_vocabulary(lambda: worker.vocabulary_share)
            fronts = ports.fronts(observers, metrics, [])
            with timeline(observe, engine):
                await Host(worker, fronts, config=config, metrics=metrics).run(until=worker.refused())
