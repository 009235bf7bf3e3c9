"""The bundled pair in int8: every topology gives the same tokens as the target alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
import pytest_asyncio

from specdec.inference.backends.onnx.packed import packed_decoder
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess
from specdec.inference.workers.completion import CompletionRequest
from tests.support.servers import complete_all, draft_server, fused_server, target_server

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

INT8 = ("--dtype", "int8")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncGenerator[list[ServerProcess], None]:
    """Start a target, a worker that takes turns with it (run-ahead may be too late to help), and a fused server."""
    for model in (BUNDLED_TARGET, BUNDLED_DRAFT):
        packed_decoder(model, "int8", None)
    async with (
        target_server(BUNDLED_TARGET, *INT8) as target,
        draft_server(BUNDLED_DRAFT, target, "--schedule", "sync", *INT8) as draft,
        fused_server(BUNDLED_TARGET, BUNDLED_DRAFT, *INT8) as fused,
    ):
        yield [target, draft, fused]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8)], ids=["greedy", "sampled"])
async def test_every_topology_gives_the_same_tokens(servers: list[ServerProcess], sampling: SamplingParams) -> None:
    requests = [
        CompletionRequest(prompt, sampling, seed=seed, max_new_tokens=24)
        for seed, prompt in enumerate(BUNDLED_PROMPTS.read_text().splitlines())
    ]
    target, *helpers = servers
    alone = await complete_all(target, [replace(request, gamma=0) for request in requests])
    for server in helpers:
        helped = await complete_all(server, requests)
        assert [h.token_ids for h in helped] == [a.token_ids for a in alone]
        assert sum(h.num_accepted_tokens for h in helped) > 0
