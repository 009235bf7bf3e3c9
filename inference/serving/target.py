"""The life of a server that holds a target: alone, to verify for draft workers, or fused with its draft."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from grpc_comm.server import Servicer
from inference.commit import Generator
from inference.config import FusedConfig, HttpConfig, ModelConfig, ObserveConfig, ServerConfig
from inference.engine.pool import DraftPool
from inference.observe.metrics import Metrics
from inference.serving.assembly import RunningTarget, fused_engine, model_card, target_engine
from inference.serving.fronts import Ports
from inference.serving.host import Host
from inference.serving.observers import Observers, observed, timeline
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.operation import Operation
from inference.workers.remote import TARGET
from inference.workers.target.verification import VerificationServicer


async def serve_target(
    model: ModelConfig, server: ServerConfig, http: HttpConfig | None, observe: ObserveConfig
) -> None:
    """Serve draft workers, and clients without any draft, until a signal.

    Raises:
        ConfigError: the model cannot be loaded, or a port is taken.
    """
    engine = target_engine(
        model, max_waiting=server.max_waiting, pass_timeout_s=server.pass_timeout_s, lookup=server.lookup
    )
    await _serve(engine, model, TARGET, Ports(server, observe, http), observe)


async def serve_fused(
    config: FusedConfig, server: ServerConfig, http: HttpConfig | None, observe: ObserveConfig
) -> None:
    """Serve thin clients with both models, until a signal.

    Raises:
        ConfigError: a model cannot be loaded, or a port is taken.
        IncompatibleDraftError: the models do not share a vocabulary.
    """
    engine = fused_engine(
        config, max_waiting=server.max_waiting, pass_timeout_s=server.pass_timeout_s, lookup=server.lookup
    )
    await _serve(engine, config.target, "fused", Ports(server, observe, http), observe)


async def _serve(
    engine: AbstractAsyncContextManager[RunningTarget],
    model: ModelConfig,
    topology: str,
    ports: Ports,
    observe: ObserveConfig,
) -> None:
    with observed(observe) as observers:
        async with engine as running:
            host = _host(running, model, topology, ports, observers)
            with timeline(observe, running.engine):
                await host.run()


def _host(running: RunningTarget, model: ModelConfig, topology: str, ports: Ports, observers: Observers) -> Host:
    engine, server, model_id = running.engine, ports.server, running.model_id(model)
    metrics = Metrics(model.name, role=observers.config.role)
    metrics.watch(engine)
    generator: Generator = engine
    card = model_card(model.name, topology, generator, running.tokenizer, server.defaults, model_id)
    servicers: list[Servicer] = []
    if topology == TARGET:
        generator = pool = DraftPool(engine, max_worker_slots=server.max_worker_slots)
        idle_timeout_s, observer = server.idle_timeout_s, observers.of_sessions(metrics)
        servicers.append(VerificationServicer(engine, pool, card, idle_timeout_s=idle_timeout_s, observer=observer))
    local = LocalCompleter(generator, running.tokenizer, server.defaults, model_id=model_id)
    completer = observers.around(local, metrics, model=model.name)
    operation = Operation(engine, may_drain=server.ends_by_call)
    servicers.append(GenerationServicer(completer, card, local.codec, operation))
    fronts = ports.fronts(observers, metrics, servicers)
    return Host(engine, fronts, config=server, metrics=metrics, operation=operation)
