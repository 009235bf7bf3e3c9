"""Role target: serves the target model to draft workers, and to clients without any draft."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.inference.cli.roles.compile import CompileSettings, compile_ahead
from specdec.inference.config import OPTIONAL_HTTP_PORT, HttpConfig, ObserveConfig, ServerConfig, usable_cores
from specdec.inference.errors import SpecDecError
from specdec.inference.request import Noise
from specdec.inference.serving.models import VLLM, DefaultSettings, TargetModel
from specdec.inference.settings import group, same


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Settings of --role target, which serves the target model to draft workers and clients."""

    model: TargetModel = group(TargetModel)
    gamma: int = same(CompileSettings, "gamma")
    server: ServerConfig = group(ServerConfig)
    http: HttpConfig | None = group(HttpConfig, needs=("http_port",), port=OPTIONAL_HTTP_PORT)
    defaults: DefaultSettings = group(DefaultSettings)
    observe: ObserveConfig = group(ObserveConfig, role="target")


async def run(settings: TargetSettings) -> int:
    settings.model.check_engine()
    if settings.model.engine == VLLM:
        return await _run_vllm(settings)
    # A draft runs beside a target on loopback; two busy processes on one core slow each other down many times over.
    num_threads = max(1, usable_cores() - 1) if settings.server.on_loopback else usable_cores()
    model = settings.model.config(num_threads=num_threads, gamma=settings.gamma)
    server = replace(settings.server, defaults=settings.defaults.of(model.path))
    if settings.model.loading.only_compiles:
        return await compile_ahead(model, None)

    from specdec.inference.serving.target import serve_target

    await serve_target(model, server, settings.http, settings.observe)
    return 0


async def _run_vllm(settings: TargetSettings) -> int:
    """Serve with vLLM as the engine; return the exit code.

    Settings are checked first, since importing vLLM takes long.
    """
    from specdec.inference.serving.fronts import check_ports
    from specdec.inference.vllm.group import in_own_group, leads_group, leave
    from specdec.inference.vllm.options import VllmModel, check_flags, prepare_environment
    from specdec.inference.vllm.translation import METHOD

    model, flags = settings.model.path, settings.model.engine_flags
    server = replace(settings.server, defaults=settings.defaults.of(model))
    check_flags(flags)
    check_ports(server, settings.observe, settings.http)
    if not leads_group():
        return await in_own_group(server.lifeline)
    prepare_environment(settings.observe.log_level, settings.model.loading.exact)
    from specdec.inference.serving.vllm_target import serve_vllm

    error = None
    try:
        noise = None if settings.model.noise is None else Noise(settings.model.noise)
        method = settings.model.own_method or METHOD
        served = VllmModel(model, flags, settings.gamma, noise, settings.model.draft, method)
        await serve_vllm(served, server, settings.http, settings.observe)
    except SpecDecError as exc:
        error = exc
    return leave(error)
