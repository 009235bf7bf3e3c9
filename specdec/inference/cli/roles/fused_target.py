"""Role fused_target: serves both models from one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.inference.cli.models import NGRAM, DefaultSettings, ModelPair
from specdec.inference.cli.roles.compile import compile_ahead
from specdec.inference.config import (
    DEFAULT_GAMMA,
    FUSED_GAMMA,
    OPTIONAL_HTTP_PORT,
    FusedConfig,
    HttpConfig,
    ObserveConfig,
    ServerConfig,
    usable_cores,
)
from specdec.inference.settings import group, same


@dataclass(frozen=True, slots=True)
class PairSettings:
    """Settings of two models in one process."""

    models: ModelPair = group(ModelPair)
    gamma: int | None = same(FusedConfig, "gamma", default=None)
    adaptive_gamma: bool = same(FusedConfig, "adaptive_gamma")


@dataclass(frozen=True, slots=True)
class FusedSettings(PairSettings):
    """Settings of --role fused_target."""

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


def fused_config(settings: PairSettings) -> FusedConfig:
    """Return the configuration of both models. Each may use all cores, since only one of them runs at a time."""
    models, loading, gamma = settings.models, settings.models.loading, settings.gamma
    method = loading.method_of_pair(has_draft=models.draft != NGRAM)
    if gamma is None:
        gamma = DEFAULT_GAMMA if loading.backend == "neuron" else FUSED_GAMMA
    neuron = loading.neuron_options(gamma=gamma, method=method)
    target = loading.target(models.target, num_threads=usable_cores(), neuron=neuron)
    draft = loading.proposer(
        models.proposer(),
        tokenizer=models.target,
        num_threads=usable_cores(),
        neuron=loading.neuron_options(method=method, tp_degree=models.draft_tp_degree),
    )
    draft = replace(draft, min_vocabulary_share=models.min_vocabulary_share)
    return FusedConfig(target, draft, gamma, settings.adaptive_gamma)
