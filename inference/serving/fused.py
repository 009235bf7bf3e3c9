"""The life of a fused server: both models in one process, thin clients."""

from __future__ import annotations

from inference.config import FusedConfig, HttpConfig, ModelConfig, ObserveConfig, ServerConfig
from inference.observe.metrics import Metrics
from inference.serving.assembly import RunningTarget, fused_engine, model_card
from inference.serving.fronts import Ports
from inference.serving.host import Host
from inference.serving.observers import Observers, observed, timeline
from inference.workers.generation import GenerationServicer
from inference.workers.local import LocalCompleter
from inference.workers.operation import Operation


async def serve_fused(
    config: FusedConfig, server: ServerConfig, http: HttpConfig | None, observe: ObserveConfig
) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: a model cannot be loaded, or a port is taken.
        IncompatibleDraftError: the models do not share a vocabulary.
    """
    ports = Ports(server, observe, http)
    with observed(observe) as observers:
        async with fused_engine(
            config, max_waiting=server.max_waiting, pass_timeout_s=server.pass_timeout_s, lookup=server.lookup
        ) as running:
            host = _host(running, config.target, ports, observers)
            with timeline(observe, running.engine):
                await host.run()


def _host(running: RunningTarget, target: ModelConfig, ports: Ports, observers: Observers) -> Host:
    engine, name, model_id = running.engine, target.name, running.identity(target)
    metrics, defaults = Metrics(name, role="fused_target"), ports.server.defaults
    metrics.watch(engine)
    local = LocalCompleter(engine, running.tokenizer, defaults, model_id=model_id)
    completer = observers.around(local, metrics, model=name)
    card = model_card(name, "fused", engine, running.tokenizer, defaults, model_id=model_id)
    operation = Operation(engine, may_drain=ports.server.ends_by_call)
    generation = GenerationServicer(completer, card, local.codec, operation)
    fronts = ports.fronts(observers, metrics, [generation])
    return Host(engine, fronts, config=ports.server, metrics=metrics, operation=operation)
