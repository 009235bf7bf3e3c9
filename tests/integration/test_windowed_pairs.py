"""Pairs with sliding windows and soft caps: real servers of every topology give the target's own tokens."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from specdec.inference.request import SamplingParams
from specdec.inference.workers.completion import CompletionRequest
from tests.support.models import save_tiny_model, tiny_model
from tests.support.servers import complete_all, draft_server, fused_server, target_server

PROMPT = tuple(range(5, 45))  # several times the window of the models


@pytest.mark.long
@pytest.mark.parametrize(("target", "draft"), [("gemma2", "mistral, windows"), ("gpt_oss", "qwen3, mixed layers")])
async def test_a_windowed_pair_gives_the_targets_tokens(target: str, draft: str, tmp_path: Path) -> None:
    models = save_tiny_model(tmp_path / "target", target, seed=1), save_tiny_model(tmp_path / "draft", draft, seed=2)
    request = CompletionRequest(PROMPT, seed=7, max_new_tokens=24, ignore_eos=True)
    requests = [request, CompletionRequest(PROMPT, SamplingParams(temperature=0.9), 7, 24, ignore_eos=True)]
    async with AsyncExitStack() as stack:
        alone = await stack.enter_async_context(target_server(models[0]))
        distributed = await stack.enter_async_context(draft_server(models[1], alone))
        fused = await stack.enter_async_context(fused_server(*models))
        greedy, sampled = [answer.token_ids for answer in await complete_all(alone, requests)]
        for server in (distributed, fused):
            assert [answer.token_ids for answer in await complete_all(server, requests)] == [greedy, sampled]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}
    expected = tiny_model(target, seed=1).generate(torch.tensor([PROMPT]), **settings)[0].tolist()
    assert [*PROMPT, *greedy] == expected
