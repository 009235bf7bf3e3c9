"""Role compile: compiles models for Neuron devices ahead of time, for the servers that will load them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.inference.config import SERVICE_FLAGS, DraftConfig, ModelConfig, NeuronOptions, ObserveConfig, usable_cores
from specdec.inference.errors import ConfigError
from specdec.inference.serving.models import CompiledModels
from specdec.inference.settings import group, same

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """Settings of --role compile, which compiles models ahead of time for the servers that will load them."""

    models: CompiledModels = group(CompiledModels)
    gamma: int = same(
        DraftConfig,
        "gamma",
        help="draft tokens that a compiled pass has room for, 0 for none (%(default)s; other backends take any number)",
        section="verification",
    )
    observe: ObserveConfig = group(ObserveConfig, role="compile", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: CompileSettings) -> int:
    """Compile the target, the draft or both; return exit code 0.

    Both become one graph if the speculation method has one for target and draft, as fused has, else a graph of each.
    """
    models, loading = settings.models, settings.models.loading
    method = loading.method_of_pair(has_draft=models.target is not None and models.draft is not None)

    def config(path: Path | None, neuron: NeuronOptions) -> ModelConfig | None:
        return None if path is None else loading.target(path, num_threads=usable_cores(), neuron=neuron)

    target = config(models.target, loading.neuron_options(gamma=settings.gamma, method=method))
    drafts = loading.neuron_options(method=method, tp_degree=models.draft_tp_degree)
    return await compile_ahead(target, config(models.draft, drafts))


async def compile_ahead(target: ModelConfig | None, draft: ModelConfig | None) -> int:
    """Compile a target with its draft, or one of the two, unless that is compiled already; return exit code 0.

    Raises:
        ConfigError: no model is given, a model's backend compiles nothing, or a model cannot be used.
    """
    if target is None and draft is None:
        raise ConfigError("nothing to compile: name --target_model, --draft_model or both")
    from specdec.inference.backends.registry import compile_models

    started = time.monotonic()
    served = draft and replace(draft, exact="never")  # as `ProposerConfig.model_with_branches` does
    await asyncio.to_thread(compile_models, target, served)
    logger.info("everything is compiled, after %.0f s", time.monotonic() - started)
    return 0
