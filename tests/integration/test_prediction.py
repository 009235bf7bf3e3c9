"""Tests of drafts from a request's prediction, and from answers that the server keeps for repeated requests."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from specdec.inference.request import MAX_PREDICTION_CHARACTERS, SamplingParams
from specdec.inference.serving.processes import ServerProcess, free_port, server_process
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.servers import complete_all, draft_server, fused_server, pool_worker, target_server

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

REQUEST = CompletionRequest("", SamplingParams(temperature=0.8), seed=77, max_new_tokens=200, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(models: ModelDirectories) -> AsyncGenerator[dict[str, ServerProcess], None]:
    """Start three servers that keep their answers as drafts for repeated requests; yield them by name.

    They are a target with a draft worker in its pool, a draft server that lets a target verify ("edge"), and a server
    with both models ("fused").
    """
    async with AsyncExitStack() as stack:
        pooled = await stack.enter_async_context(target_server(models.endless, "--replay", "4"))
        await stack.enter_async_context(pool_worker(models.endless, pooled.address))
        verifies = await stack.enter_async_context(target_server(models.endless, "--replay", "4"))
        edge = await stack.enter_async_context(draft_server(models.endless, verifies))
        fused = await stack.enter_async_context(fused_server(models.endless, models.endless, "--replay", "4"))
        yield {"pool": pooled, "edge": edge, "fused": fused}


@pytest.mark.parametrize("topology", ["pool", "edge", "fused"])
async def test_a_kept_answer_is_proposed_again(servers: dict[str, ServerProcess], topology: str) -> None:
    """When a request is repeated, its first answer serves as the draft of the second.

    The second answer has the same tokens, in less than half as many passes.
    """
    request = replace(REQUEST, prompt=f"a replay, {topology}")
    (first,) = await complete_all(servers[topology], [request])
    (second,) = await complete_all(servers[topology], [request])
    assert second.token_ids == first.token_ids
    assert second.num_lookup_tokens > 60
    assert second.num_deltas < len(second.token_ids) / 2


ROLES = 'roles = ["client"]'


@pytest.fixture
def accounts(tmp_path: Path) -> Path:
    """Write an auth file with two accounts that share the cached prefixes of prompts; return its path."""
    tokens = [
        f'[[token]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{ROLES}\n'
        for name in ("alice-secret-token", "bob-secret-token")
    ]
    group = '[[prefix_group]]\nname = "team"\naccounts = ["alice-secret-token", "bob-secret-token"]\n'
    path = tmp_path / "auth.toml"
    path.write_text("\n".join([*tokens, group]))
    return path


async def posted(port: int, who: str = "", **fields: Any) -> httpx.Response:
    body = {"prompt": "the old wind", "max_tokens": 80, "seed": 5, "temperature": 0.8, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        headers = {"Authorization": f"Bearer {who}"} if who else {}
        return await client.post("/v1/completions", json=body, headers=headers)


def details(answer: httpx.Response) -> dict[str, int]:
    assert answer.status_code == 200, answer.text
    found: dict[str, int] = answer.json()["usage"]["completion_tokens_details"]
    return found


async def test_usage_counts_the_prediction_alone(models: ModelDirectories) -> None:
    """Usage counts the tokens of a request's prediction, given as text or in parts, as accepted or rejected.

    Tokens of a kept answer, which also served as a draft, are not counted.
    """
    port = free_port()
    nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    async with target_server(models.endless, "--http_port", str(port), "--replay", "4"):
        first = await posted(port, cache_salt="a")
        text = first.json()["choices"][0]["text"]
        assert details(first) == nothing
        parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        for salt, content in (("b", text), ("d", parts)):
            answer = await posted(port, cache_salt=salt, prediction={"type": "content", "content": content})
            assert answer.json()["choices"][0]["text"] == text
            assert details(answer)["accepted_prediction_tokens"] > 0
        wrong = await posted(port, cache_salt="c", prediction={"type": "content", "content": text[::-1]})
        assert wrong.json()["choices"][0]["text"] == text
        assert details(wrong)["rejected_prediction_tokens"] > 0
        again = await posted(port, cache_salt="a")
        assert details(again) == nothing
        assert again.json()["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 50
        for bad in (
            {"type": "content"},
            {"type": "text", "content": "x"},
            {"type": "content", "content": 5},
            {"type": "content", "content": "x" * (MAX_PREDICTION_CHARACTERS + 1)},
        ):
            refused = await posted(port, prediction=bad)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"].startswith("prediction")
            assert "prediction" in error["message"]


async def test_no_account_gets_drafts_of_another(models: ModelDirectories, accounts: Path) -> None:
    """A kept answer is used as a draft only for the account that got it, even if accounts share cached prefixes."""
    port, grpc_port = free_port(), free_port()
    serving = ("--model", str(models.endless), "--port", str(grpc_port), "--http_port", str(port), "--threads", "1")
    flags = (*serving, "--replay", "4", "--no-lookup", "--auth_file", str(accounts), "--insecure")
    async with server_process("target", "target", *flags, port=grpc_port, ready_line="serving on"):
        answers = [await posted(port, who) for who in ("alice-secret-token", "bob-secret-token", "alice-secret-token")]
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    drafted = ["metrics" in answer.json() for answer in answers]
    assert drafted == [False, False, True]
