"""Role fused_client: completes prompts at any server of this project, without a model of its own."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.inference.cli.prompts.source import PromptSettings
from specdec.inference.config import SERVICE_FLAGS, ConnectionConfig, DraftConfig, Loading, ObserveConfig
from specdec.inference.settings import group, same


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of --role fused_client, which completes prompts at a server, without a model of its own."""

    connection: ConnectionConfig = group(ConnectionConfig)
    batch: int = same(Loading, "num_slots", help="prompts in flight at once", section="load")
    gamma: int | None = same(
        DraftConfig, "gamma", default=None, help="draft tokens per round, 0 for none (default: the server's)"
    )
    prompts: PromptSettings = group(PromptSettings)
    observe: ObserveConfig = group(ObserveConfig, role="fused_client", without=(*SERVICE_FLAGS, "trace"))


async def run(settings: ClientSettings) -> int:
    job = settings.prompts.job(
        concurrency=settings.batch,
        observe=settings.observe,
        gamma=settings.gamma,
        deadline_s=settings.connection.deadline_s,
    )

    from specdec.inference.cli.prompts.topologies import run_edge

    return await run_edge(job, settings.connection)
