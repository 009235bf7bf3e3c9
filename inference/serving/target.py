"""The life of a target: verification for draft workers, and generation without any."""

from __future__ import annotations

from inference.config import HttpConfig, ModelConfig, ObserveConfig, ServerConfig
from inference.engine.pool import DraftPool
from inference.observe.metrics import Metrics
from inference.serving.assembly import RunningTarget, model_card, target_engine
from inference.serving.fronts import Ports
from inference.serving.host import Host
from inference.serving.observers import Observers, observed, timeline
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.operation import Operation
from inference.workers.target.verification import TargetIdentity, VerificationServicer


async def serve_target(
    model: ModelConfig, server: ServerConfig, http: HttpConfig | None, observe: ObserveConfig
) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: the model cannot be loaded, or a port is taken.
    """
    ports = Ports(server, observe, http)
    with observed(observe) as observers:
        async with target_engine(
            model, max_waiting=server.max_waiting, pass_timeout_s=server.pass_timeout_s, lookup=server.lookup
        ) as running:
            host = _host(running, model, ports, observers)
            with timeline(observe, running.engine):
                await host.run()


def _host(running: RunningTarget, model: ModelConfig, ports: Ports, observers: Observers) -> Host:
    engine, metrics, name = running.engine, Metrics(model.name, role="target"), model.name
    server = ports.server
    metrics.watch(engine)
    pool = DraftPool(engine, max_worker_slots=server.max_worker_slots)
    model_id = running.identity(model)
    verification = VerificationServicer(
        engine,
        pool,
        TargetIdentity(running.vocabulary, model_id),
        idle_timeout_s=server.idle_timeout_s,
        observer=observers.of_sessions(metrics),
    )
    local = LocalCompleter(pool, running.tokenizer, server.defaults, model_id=model_id)
    completer = observers.around(local, metrics, model=name)
    card = model_card(name, "target", pool, running.tokenizer, server.defaults, model_id)
    operation = Operation(engine, may_drain=server.ends_by_call)
    generation = GenerationServicer(completer, card, local.codec, operation)
    fronts = ports.fronts(observers, metrics, [verification, generation])
    return Host(engine, fronts, config=server, metrics=metrics, operation=operation)
