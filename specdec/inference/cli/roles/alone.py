"""Roles verify_target, verify_draft and verify_fused: complete prompts with models of this process, no server."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.inference.cli.prompts.source import PromptSettings
from specdec.inference.cli.roles.compile import compile_ahead
from specdec.inference.config import BUNDLED_DRAFT, SERVICE_FLAGS, ObserveConfig, usable_cores
from specdec.inference.serving.models import OneModel, PairSettings, fused_config
from specdec.inference.settings import group, setting

DRAFT_DIRECTORY = setting(BUNDLED_DRAFT, "--model --draft_model DIR", help="draft model directory")


@dataclass(frozen=True, slots=True)
class VerifyTargetSettings:
    """Settings of --role verify_target, which completes prompts with the target model alone, in this process."""

    model: OneModel = group(OneModel)
    prompts: PromptSettings = group(PromptSettings)
    observe: ObserveConfig = group(ObserveConfig, role="verify_target", without=SERVICE_FLAGS)


@dataclass(frozen=True, slots=True)
class VerifyDraftSettings(VerifyTargetSettings):
    """Settings of --role verify_draft, which completes prompts with the draft model alone, in this process."""

    model: OneModel = group(OneModel, path=DRAFT_DIRECTORY)
    observe: ObserveConfig = group(ObserveConfig, role="verify_draft", without=SERVICE_FLAGS)


@dataclass(frozen=True, slots=True)
class VerifyFusedSettings(PairSettings):
    """Settings of --role verify_fused, which completes prompts with target and draft in this process."""

    prompts: PromptSettings = group(PromptSettings)
    observe: ObserveConfig = group(ObserveConfig, role="verify_fused", without=SERVICE_FLAGS)


async def run(settings: VerifyTargetSettings) -> int:
    model, loading = settings.model.config(num_threads=usable_cores()), settings.model.loading
    if loading.only_compiles:
        return await compile_ahead(model, None)
    job = settings.prompts.job(concurrency=loading.num_slots, observe=settings.observe)

    from specdec.inference.cli.prompts.topologies import run_alone

    return await run_alone(job, model)


async def run_draft(settings: VerifyDraftSettings) -> int:
    return await run(settings)


async def run_fused(settings: VerifyFusedSettings) -> int:
    config, loading = fused_config(settings), settings.models.loading
    if loading.only_compiles:
        return await compile_ahead(config.target, config.draft.model)
    job = settings.prompts.job(concurrency=loading.num_slots, observe=settings.observe)

    from specdec.inference.cli.prompts.topologies import run_alone

    return await run_alone(job, config)
