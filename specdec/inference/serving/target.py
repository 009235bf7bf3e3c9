"""Life cycle of a server with a target: alone, to verify for draft workers, or with its draft in one process."""

from __future__ import annotations

from dataclasses import replace

from specdec.grpc_comm.server import Servicer
from specdec.inference.commit import TokenSource
from specdec.inference.config import MEASURED, FusedConfig, HttpConfig, ModelConfig, ObserveConfig, ServerConfig
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import EngineLimits
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.assembly import RunningTarget, model_card, target_engine, target_of
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.host import Host
from specdec.inference.serving.observers import Observers, observed, timeline
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.completing.generation import GenerationServicer, Operation
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.remote import FUSED, TARGET
from specdec.inference.workers.drafting.service import VerificationServicer


async def serve_target(
    config: ModelConfig | FusedConfig, server: ServerConfig, http: HttpConfig | None, observe: ObserveConfig
) -> None:
    """Serve a target to draft workers and clients, or a target with its draft to clients, until a signal.

    Raises:
        ConfigError: a model cannot be loaded, or a port is taken.
        IncompatibleDraftError: the models of a pair do not share a vocabulary.
    """
    ports = Ports(server, observe, http)
    topology = FUSED if isinstance(config, FusedConfig) else TARGET
    with observed(observe) as observers:
        async with target_engine(config, _limits_of(server)) as running:
            model = target_of(config)
            await serve(running, model.name, running.model_id(model), topology, ports, observers)


def _limits_of(server: ServerConfig) -> EngineLimits:
    return EngineLimits(
        server.max_waiting,
        pass_timeout_s=server.pass_timeout_s,
        lookup=server.lookup,
        prompt_share=server.prompt_share,
        drafting=server.drafting,
        answers_bytes=int(server.replay * 2**20),
        num_spare=int(server.security.auth_file is not None),  # without one there is a single account
    )


async def serve(
    running: RunningTarget, name: str, model_id: str, topology: str, ports: Ports, observers: Observers
) -> None:
    """Serve a running target, whatever its engine, until a signal.

    Args:
        running: engine and tokenizer of the target.
        name, model_id: name and id of the model, for clients.
        topology: kind of the server; only one of kind TARGET has a pool of draft workers.
        ports: ports to open.
        observers: what to record about requests.
    """
    engine, server = running.engine, ports.server
    metrics = Metrics(name, role=observers.config.role)
    metrics.watch(engine)
    if server.drafting == MEASURED:
        metrics.watch_drafting(engine.drafting)
    if (share := running.vocabulary_share) is not None:
        metrics.watch_vocabulary(lambda: share)
    metrics.watch_graphs(running.models)
    for collector in running.collectors:
        metrics.registry.register(collector(metrics.registry))
    generator: TokenSource = engine
    card = model_card(name, topology, generator, running.tokenizer, server.defaults, model_id)
    card = replace(card, adapters=tuple(running.adapters))
    servicers: list[Servicer] = []
    if topology == TARGET:
        slots, idle_timeout_s = server.max_worker_slots, server.idle_timeout_s
        generator = pool = DraftPool(engine, max_worker_slots=slots, idle_timeout_s=idle_timeout_s)
        if running.lend is not None:
            running.lend(pool, metrics)
        words = Vocabulary(card.tokenizer_fingerprint, card.vocab_size)
        servicers.append(VerificationServicer(pool, words, running.tokenizer, running.noise, running.num_threads))
    local = LocalCompleter(generator, running.tokenizer, server.defaults, model_id=model_id, adapters=running.adapters)
    completer = observers.around(local, metrics, model=name)
    operation = Operation(engine, may_drain=server.ends_by_call)
    servicers.append(GenerationServicer(completer, card, local.codec, operation))
    fronts = ports.fronts(observers, metrics, servicers)
    with timeline(observers.config, engine):
        await Host(engine, fronts, config=server, metrics=metrics, operation=operation).run()
