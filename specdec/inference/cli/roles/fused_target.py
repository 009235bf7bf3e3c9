"""Role fused_target: serves target and draft from one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.inference.cli.roles.compile import compile_ahead
from specdec.inference.config import (
    OPTIONAL_HTTP_PORT,
    HttpConfig,
    ObserveConfig,
    ServerConfig,
)
from specdec.inference.serving.models import DefaultSettings, PairSettings, fused_config
from specdec.inference.settings import group


@dataclass(frozen=True, slots=True)
class FusedSettings(PairSettings):
    """Settings of --role fused_target, which serves target and draft from one process."""

    server: ServerConfig = group(ServerConfig, without=("idle_timeout_s", "max_worker_slots"))
    http: HttpConfig | None = group(HttpConfig, needs=("http_port",), port=OPTIONAL_HTTP_PORT)
    defaults: DefaultSettings = group(DefaultSettings)
    observe: ObserveConfig = group(ObserveConfig, role="fused_target")


async def run(settings: FusedSettings) -> int:
    config, defaults = fused_config(settings), settings.defaults.of(settings.models.target)
    if settings.models.loading.only_compiles:
        return await compile_ahead(config.target, config.draft.model)

    from specdec.inference.serving.target import serve_target

    await serve_target(config, replace(settings.server, defaults=defaults), settings.http, settings.observe)
    return 0
