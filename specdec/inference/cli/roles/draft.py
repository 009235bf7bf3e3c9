"""Role draft: drafts in this process for a target elsewhere, and completes prompts, or serves clients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.inference.cli.prompts.source import PromptSettings
from specdec.inference.cli.roles import worker
from specdec.inference.cli.roles.compile import compile_ahead
from specdec.inference.cli.roles.worker import WorkerSettings, ways_out, with_branches
from specdec.inference.config import (
    OF_MODELS,
    OPTIONAL_HTTP_PORT,
    DraftConfig,
    HttpConfig,
    ObserveConfig,
    ProposerConfig,
    ServerConfig,
    optional_grpc_port,
)
from specdec.inference.errors import ConfigError
from specdec.inference.serving.models import DraftModel
from specdec.inference.settings import group, same

SERVICE = "service (instead of prompts)"


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of --role draft, which drafts in this process for a target elsewhere."""

    model: DraftModel = group(DraftModel)
    draft: DraftConfig = group(DraftConfig)
    branches: int = same(WorkerSettings, "branches", section="link to the target")
    prompts: PromptSettings = group(PromptSettings)
    server: ServerConfig | None = group(
        ServerConfig,
        SERVICE,
        needs=("serve", "http_port", "attach"),
        without=OF_MODELS,
        port=optional_grpc_port("serve gRPC clients"),
    )
    http: HttpConfig | None = group(HttpConfig, needs=("http_port",), port=OPTIONAL_HTTP_PORT)
    attach: str | None = same(
        WorkerSettings, "attach", default=None, help="do as role worker", section="pool (instead of prompts)"
    )
    observe: ObserveConfig = group(ObserveConfig, role="draft")


async def run(settings: DraftSettings) -> int:
    with ways_out(settings.model):
        return await _run(settings)


async def _run(settings: DraftSettings) -> int:
    if settings.attach is not None and settings.server is not None:
        return await _attach(settings, settings.attach, settings.server)
    proposer = proposer_config(settings)
    if settings.model.loading.only_compiles:
        return await compile_ahead(None, proposer.model_with_branches)
    if settings.server is None:
        return await _complete(settings, proposer)

    from specdec.inference.serving.edge import Drafting, serve_edge

    draft = replace(settings.draft, max_waiting=settings.server.max_waiting)
    await serve_edge(draft.connection, settings.server, settings.http, settings.observe, Drafting(proposer, draft))
    return 0


def proposer_config(settings: DraftSettings) -> ProposerConfig:
    """Return the configuration of the draft that the settings describe.

    If the draft runs ahead of the target's answers and its backend can copy slots, it also prepares branches, which are
    alternatives to its likeliest continuation.
    """
    runs_ahead = settings.draft.schedule.runs_ahead
    return with_branches(settings.model, settings.branches) if runs_ahead else settings.model.config()


async def _complete(settings: DraftSettings, proposer: ProposerConfig) -> int:
    job = settings.prompts.job(
        concurrency=settings.model.loading.num_slots,
        observe=settings.observe,
        gamma=settings.draft.gamma,
        deadline_s=settings.draft.connection.deadline_s,
    )

    from specdec.inference.cli.prompts.topologies import run_edge
    from specdec.inference.serving.edge import Drafting

    draft = replace(settings.draft, max_waiting=len(job.prompts))
    return await run_edge(job, draft.connection, Drafting(proposer, draft))


async def _attach(settings: DraftSettings, attach: str, server: ServerConfig) -> int:
    for flag, given in (("--profile", settings.observe.profile), ("--http_port", settings.http is not None)):
        if given:
            raise ConfigError(f"{flag} with --attach: the requests live at the target; give it there")
    draft, security = settings.draft, settings.draft.connection.security
    own = WorkerSettings(attach, security, settings.model, draft.gamma, settings.branches, server, settings.observe)
    return await worker.run(own)
