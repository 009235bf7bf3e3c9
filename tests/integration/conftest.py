"""Servers that several test modules share: a target, and servers with drafts of various quality for it or its model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest_asyncio

from specdec.inference.serving.processes import ServerProcess
from tests.conftest import ModelDirectories
from tests.support.servers import draft_server, fused_server, target_server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def target(models: ModelDirectories) -> AsyncGenerator[ServerProcess, None]:
    async with target_server(models.chat_target) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def topologies(models: ModelDirectories, target: ServerProcess) -> AsyncGenerator[dict[str, ServerProcess], None]:
    """Start the servers that decode speculatively with `target` or its model, and yield them by name.

    "related", "stranger" and "itself" each have a draft model of that name, and let `target` verify. "fused" has the
    draft and the target's model in one process.
    """
    servers = {
        "related": draft_server(models.related, target),
        "stranger": draft_server(models.stranger, target, "--sequence_length", "64"),
        "itself": draft_server(models.target, target),
        "fused": fused_server(models.target, models.related),
    }
    async with AsyncExitStack() as stack:
        started = await asyncio.gather(*(stack.enter_async_context(server) for server in servers.values()))
        yield dict(zip(servers, started, strict=True))
