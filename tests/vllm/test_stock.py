"""Test that this project's target on vLLM's model runner V2 gives the texts of stock vLLM for the same seeds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import grpc
import httpx
import pytest

from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess, Start, free_port, server_process
from specdec.inference.workers.completion import CompletionRequest
from tests.support.engine_contract import PROMPT
from tests.support.raw_worker import RawWorker, after, proposing, raw_worker
from tests.support.servers import Completion, complete_all, pool_worker, until_healthy
from tests.vllm.conftest import FLAGS, INTERPRETED, Pair

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]

NUM_TOKENS = 24
START_S = 300.0
WAYS: Sequence[tuple[int, dict[str, Any]]] = (
    (0, {"temperature": 0.8}),
    (7, {"temperature": 1.0, "top_k": 20}),
    (2**31, {"temperature": 0.7, "top_p": 0.9}),
    (2**63 - 1, {"temperature": 1.3, "min_p": 0.1}),
    (2**63, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02}),
    (2**64 - 3, {"temperature": 0.005, "top_k": 5}),
    (5, {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.25}),
    (6, {"temperature": 0.0}),
    (8, {"temperature": 1.0, "logit_bias": {5: 3.0, 100: 4.0, 70: -5.0}}),
    (9, {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
)
"""Seed and sampling parameters of each request, as vLLM's API takes them."""


def requests() -> list[CompletionRequest]:
    """Return a request for each of `WAYS`, each with another prompt."""
    ends: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    ours = [{**way, "logit_bias": tuple(way.get("logit_bias", {}).items())} for _, way in WAYS]
    return [
        CompletionRequest(PROMPT[number:], SamplingParams(**way), seed=seed, **ends)
        for number, (way, (seed, _)) in enumerate(zip(ours, WAYS, strict=True))
    ]


@asynccontextmanager
async def stock_server(pair: Pair, *flags: str) -> AsyncGenerator[int, None]:
    """Run a stock vLLM server, without this project's configuration, with further flags; yield its port at once."""
    port = free_port()
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(pair.target), "--served-model-name", "stock")
    where = ("--host", "127.0.0.1", "--port", str(port))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *module, *where, *FLAGS, *flags, start_new_session=True
    )
    try:
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def stock_answers(port: int) -> list[list[int]]:
    """Send the requests of `WAYS` to a stock vLLM server; return the answers' token ids."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:

        async def one(seed: int, way: dict[str, Any], prompt: Sequence[int]) -> list[int]:
            seed -= 2**64 * (seed >= 2**63)  # vLLM's seeds are signed
            ends = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
            body = {"model": "stock", "prompt": list(prompt), "seed": seed, **way, **ends}
            answer = (await client.post("/v1/completions", json=body)).raise_for_status()
            token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
            return token_ids

        return await asyncio.gather(*(one(*way, PROMPT[number:]) for number, way in enumerate(WAYS)))


def our_server(pair: Pair) -> AbstractAsyncContextManager[ServerProcess]:
    """Run a target of this project with vLLM as its engine."""
    port = free_port()
    ours = (
        "--engine",
        "vllm",
        "--model",
        str(pair.target),
        "--port",
        str(port),
        "--drafting=always",
    )
    return server_process("target", "target", *ours, "--", *FLAGS, port=port, start=Start(START_S))


async def lie(worker: RawWorker, right: Sequence[Sequence[int]]) -> None:
    """Propose, as a draft worker, two right tokens and four random ones after each commit, until the stream ends.

    Without right tokens, the target would soon verify no more proposals.
    """
    chance, texts = random.Random(3), dict[str, list[int]]()
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await worker.call.read()) != grpc.aio.EOF:
            if message.WhichOneof("message") == "open":
                name, prompt = message.open.session_id, list(message.open.open.prompt_token_ids)
                texts[name], end = [*prompt, *right[len(PROMPT) - len(prompt)]], len(prompt)
            elif message.WhichOneof("message") == "commit":
                commit = message.commit.commit
                name, end = message.commit.session_id, commit.position + len(commit.token_ids)
            else:
                continue
            lies = chance.choices(range(256), k=4)
            await worker.call.write(proposing(name, after(end, *texts[name][end : end + 2], *lies)))


async def test_the_texts_are_those_of_stock_vllm(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target gives the tokens of stock vLLM: without draft tokens, with many wrong ones, and with good ones."""
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    async with stock_server(pair) as port, our_server(pair) as target:
        await until_healthy(port)
        right = await stock_answers(port)

        async def asked() -> list[Completion]:
            answers = await complete_all(target, requests(), concurrency=2)
            assert [answer.token_ids for answer in answers] == right
            return answers

        await asked()
        async with raw_worker(target.address, is_private=False) as liar:
            lying = asyncio.create_task(lie(liar, right))
            assert sum(answer.num_draft_tokens for answer in await asked()) > 0
            lying.cancel()
        async with pool_worker(pair.draft, target.address):
            assert sum(answer.num_accepted_tokens for answer in await asked()) > 0
