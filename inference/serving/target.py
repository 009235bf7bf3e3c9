"""The life of a target: verification for draft workers, and generation without any."""

from __future__ import annotations

from inference.backends.identity import model_identity
from inference.config import ModelConfig, ObserveConfig, ServerConfig
from inference.engine.pool import DraftPool
from inference.observe.metrics import Metrics
from inference.serving.assembly import RunningTarget, model_card, target_engine
from inference.serving.fronts import GrpcFront, metrics_fronts
from inference.serving.host import Host
from inference.serving.observers import Observers, observed, timeline
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.target.verification import TargetIdentity, VerificationServicer


async def serve_target(model: ModelConfig, server: ServerConfig, observe: ObserveConfig) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: the model cannot be loaded, or a port is taken.
    """
    with observed(observe) as observers:
        async with target_engine(model, max_waiting=server.max_waiting) as running:
            host = _host(running, model, server, observers)
            with timeline(observe, running.engine):
                await host.run()


def _host(running: RunningTarget, model: ModelConfig, server: ServerConfig, observers: Observers) -> Host:
    engine, metrics, name = running.engine, Metrics(model.path.name), model.path.name
    metrics.watch(engine)
    pool = DraftPool(engine)
    model_id = model_identity(model.path, model.dtype, model.backend, model.device)
    verification = VerificationServicer(
        engine,
        pool,
        TargetIdentity(running.vocabulary, model_id),
        idle_timeout_s=server.idle_timeout_s,
        observer=observers.of_sessions(metrics),
    )
    completer = observers.around(LocalCompleter(pool, running.tokenizer), metrics, model=name)
    generation = GenerationServicer(completer, model_card(name, "target", pool, running.tokenizer))
    grpc_front = GrpcFront(server, [verification, generation], observers)
    return Host(engine, [*metrics_fronts(observers, metrics, server), grpc_front], grace_s=server.grace_s)
