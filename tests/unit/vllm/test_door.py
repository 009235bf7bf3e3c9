"""The middleware before vLLM's HTTP server, without vLLM: which bodies are refused, and what vLLM refuses no more."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.inference.vllm.door import Door


class Params:
    """vLLM's sampling parameters, as far as the middleware knows them."""

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        raise ValueError("not yet supported with speculative decoding")


@pytest.fixture(autouse=True)
def params(monkeypatch: pytest.MonkeyPatch) -> type[Params]:
    kind = type("SamplingParams", (Params,), {})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(SamplingParams=kind))
    return kind


async def passed(content: str | bytes) -> httpx.Response:
    """Return the answer to a body; an application that is let in answers with the body as it came in."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(await Request(scope, receive).body())(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(Door(application)), base_url="http://vllm") as client:
        return await client.post("/v1/chat/completions", content=content)


async def test_fields_that_vllm_refuses_beside_drafts_pass(params: type[Params]) -> None:
    """Stock clients send `min_p` and `logit_bias` as they do to any server, on every path.

    Regression: vLLM refused each such request, and clients had to name the fields in `vllm_xargs`.
    """
    with pytest.raises(ValueError, match="not yet supported"):
        params()._validate_spec_decode({})
    body = json.dumps({"prompt": "é", "min_p": 0.1, "logit_bias": {"5": -100}, "vllm_xargs": {"gamma": 2}})
    assert (await passed(body)).text == body
    params()._validate_spec_decode({})


@pytest.mark.parametrize(
    "content",
    [
        '{"vllm_xargs": null}',
        '{"vllm_xargs": {}}',
        '["vllm_xargs"]',
        '{"vllm_xargs": ',
        b'{"prompt": "vllm_xargs \xff"}',
        '{"vllm_xargs": {"gamma": 64, "other": 1}}',
    ],
)
async def test_other_bodies_stay_as_they_came(content: str | bytes) -> None:
    answer = await passed(content)
    assert answer.is_success
    assert answer.content == (content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("gamma", [65, -1, "2", 1.0, True])
async def test_a_wrong_gamma_is_refused_by_name(gamma: Any) -> None:
    answer = await passed(json.dumps({"prompt": "x", "vllm_xargs": {"gamma": gamma}}))
    assert answer.status_code == 400
    assert f"gamma {gamma!r} must be an integer in" in answer.json()["error"]["message"]
