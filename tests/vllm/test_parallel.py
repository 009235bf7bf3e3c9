"""Test of vLLM with several workers or engine cores: it stays one engine with one port, and gives one core's tokens."""

from __future__ import annotations

import asyncio
import random

import pytest

from specdec.inference.config import ServerConfig
from specdec.inference.serving.assembly import running
from specdec.inference.vllm.options import VllmModel
from tests.support.engine_contract import MODES, PROMPT, Drafting, completed, onnx_engine, wanted
from tests.vllm.conftest import FLAGS, LAW, MAX_LENGTH, Pair

pytestmark = pytest.mark.release


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--data-parallel-size"])
async def test_two_workers_or_two_cores_have_the_tokens_of_one(pair: Pair, flag: str) -> None:
    """Two vLLM workers, or two engine cores, give the same tokens as one.

    With two cores, each serves a part of the requests, and a draft worker's tokens reach the core of their request.
    """
    from specdec.inference.serving.vllm_target import vllm_engine

    requests = [wanted(mode, prompt=PROMPT[number:]) for number, mode in enumerate([*MODES][:4])]
    async with running(onnx_engine(pair.target, MAX_LENGTH, LAW)) as onnx:
        right = [(await completed(onnx, request))[0] for request in requests]
    model = VllmModel(pair.target, (*FLAGS, flag, "2"), gamma=16)
    async with vllm_engine(model, ServerConfig(max_waiting=2, lookup=False)) as (held, _):
        drafts = [Drafting(tokens, 0.3, random.Random(3)) for tokens in right]
        pairs = zip(requests, drafts, strict=True)
        got = await asyncio.gather(*(completed(held.engine, *each) for each in pairs))
        assert [tokens for tokens, _ in got] == right
        assert sum(commit.num_accepted_tokens for _, commits in got for commit in commits) > 0
        assert held.engine.num_slots == (8 if flag.startswith("--data") else 4)
