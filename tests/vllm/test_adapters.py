"""Tests of LoRA adapters on vLLM: each has its own tokens, and draft tokens of the plain model help requests to all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from specdec.inference.config import ServerConfig
from specdec.inference.engine.target import TargetEngine
from specdec.inference.errors import InternalError
from specdec.inference.serving.assembly import running
from specdec.inference.vllm.options import VllmModel
from tests.support.engine_contract import PROMPT, Drafting, completed, onnx_engine, wanted
from tests.vllm.conftest import LAW, MAX_LENGTH, Pair

pytestmark = [pytest.mark.release, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def onnx(pair: Pair) -> AsyncGenerator[TargetEngine, None]:
    async with running(onnx_engine(pair.target, MAX_LENGTH, LAW)) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(pair: Pair) -> AsyncGenerator[Any, None]:
    from specdec.inference.serving.vllm_target import vllm_engine

    async with vllm_engine(VllmModel(pair.target, pair.flags, gamma=16), ServerConfig(max_waiting=2)) as (held, _):
        assert list(held.adapters) == ["other", "broken"]
        assert len(set(held.adapters.values())) == 2
        yield held.engine


async def test_an_adapter_has_the_tokens_of_merged_weights(vllm: Any, onnx: TargetEngine, pair: Pair) -> None:
    """Requests to an adapter get the tokens of a model with the adapter's weights added to its own.

    Requests with and without the adapter run together and share no prefix. The plain model drafts for both.
    """
    async with running(onnx_engine(pair.merged, MAX_LENGTH, LAW)) as merged:
        for mode in ("greedy", "noise", "penalties"):
            request = wanted(mode, prompt=PROMPT, max_new_tokens=28)
            base, other = [(await completed(engine, request))[0] for engine in (onnx, merged)]
            assert base != other
            await completed(vllm, request)
            drafting = Drafting(base, 0.3, random.Random(5))
            adapted = replace(request, adapter="other")
            got = await asyncio.gather(*(completed(vllm, each, drafting) for each in (request, adapted, adapted)))
            assert [tokens for tokens, _ in got] == [base, other, other]


async def test_a_request_without_finite_logits_fails_and_the_others_go_on(vllm: Any, onnx: TargetEngine) -> None:
    """A request with logits that are not finite fails, and the others go on.

    Regression: from a row of NaN, vLLM chose the first token greedily, without an error, and the request went on.
    """
    request = wanted("noise")
    tokens, _ = await completed(onnx, request)
    for mode in ("noise", "greedy"):
        broken = replace(wanted(mode), adapter="broken")
        failed, alone, drafted = await asyncio.gather(
            completed(vllm, broken, Drafting(tokens, 0.3, random.Random(1))),
            completed(vllm, request),
            completed(vllm, request, Drafting(tokens, 0.3, random.Random(2))),
            return_exceptions=True,
        )
        assert isinstance(failed, InternalError)
        assert "not finite" in failed.message
        assert not isinstance(alone, BaseException)
        assert not isinstance(drafted, BaseException)
        assert alone[0] == drafted[0] == tokens
