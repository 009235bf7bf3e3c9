"""Role target: serves the target model to draft workers, and to clients without any draft."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.inference.cli.models import DefaultSettings, OneModel
from specdec.inference.cli.roles.compile import CompileSettings, compile_ahead
from specdec.inference.config import OPTIONAL_HTTP_PORT, HttpConfig, ObserveConfig, ServerConfig, usable_cores
from specdec.inference.settings import group, same


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Settings of --role target."""

    model: OneModel = group(OneModel)
    gamma: int = same(CompileSettings, "gamma")
    server: ServerConfig = group(ServerConfig)
    http: HttpConfig | None = group(HttpConfig, needs=("http_port",), port=OPTIONAL_HTTP_PORT)
    defaults: DefaultSettings = group(DefaultSettings)
    observe: ObserveConfig = group(ObserveConfig, role="target")


async def run(settings: TargetSettings) -> int:
    # A draft runs beside a target on loopback; two busy processes on one core slow each other down many times over.
    num_threads = max(1, usable_cores() - 1) if settings.server.on_loopback else usable_cores()
    model = settings.model.config(num_threads=num_threads, gamma=settings.gamma)
    server = replace(settings.server, defaults=settings.defaults.of(model.path))
    if settings.model.loading.only_compiles:
        return await compile_ahead(model, None)

    from specdec.inference.serving.target import serve_target

    await serve_target(model, server, settings.http, settings.observe)
    return 0
