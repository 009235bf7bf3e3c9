"""The middleware before vLLM's HTTP server, without vLLM: which bodies reach it, and which are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.inference.vllm.adoption import Xargs
from specdec.inference.vllm.door import Door

CHATS = "/v1/chat/completions"


async def passed(content: str | bytes, path: str = CHATS) -> httpx.Response:
    """Return the answer to a body; an application that is let in answers with the body as it came in."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(await Request(scope, receive).body())(scope, receive, send)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        state = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 100)))
        scope["app"] = SimpleNamespace(state=state)
        await Door(application)(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://vllm") as client:
        return await client.post(path, content=content)


async def test_fields_that_vllm_refuses_beside_drafts_reach_our_choice() -> None:
    """Stock clients send `min_p` and `logit_bias` as they do to any server.

    Regression: vLLM refused each such request, and clients had to name the fields in `vllm_xargs`.
    """
    body = {"prompt": "é", "min_p": 0.1, "logit_bias": {"5": -100}, "seed": 3, "vllm_xargs": {"gamma": 2}}
    for path in (CHATS, "/v1/completions"):
        found = (await passed(json.dumps(body), path)).json()
        xargs = found.pop("vllm_xargs")
        assert found == {"prompt": "é", "seed": 3, "min_p": 0, "logit_bias": None}
        assert Xargs.read(xargs, 100) == Xargs(gamma=2, min_p=0.1, logit_bias=((5, -100.0),))


@pytest.mark.parametrize(
    "content",
    ['{"prompt": "min_p"}', '{"min_p": null}', '["min_p"]', '{"min_p": ', b'{"prompt": "min_p \xff"}', '"logit_bias"'],
)
async def test_other_bodies_stay_as_they_came(content: str | bytes) -> None:
    answer = await passed(content)
    assert answer.is_success
    assert answer.content == (content.encode() if isinstance(content, str) else content)


async def test_other_paths_stay_as_they_came() -> None:
    assert (await passed('{"min_p": 0.5}', "/v1/responses")).json() == {"min_p": 0.5}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"min_p": 2}, "min_p 2 must be in"),
        ({"min_p": "x"}, "min_p 'x' must be in"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias '[5]' must be a JSON object's text"),
        ({"vllm_xargs": {"gamma": 99}}, "gamma 99 must be an integer"),
    ],
)
async def test_wrong_values_are_refused_by_name(fields: dict[str, Any], part: str) -> None:
    answer = await passed(json.dumps({"prompt": "x", **fields}))
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]
