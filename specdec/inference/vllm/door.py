"""Middleware of vLLM's HTTP server (`--middleware`): it refuses wrong values of this project's fields by their names.

vLLM checks none of `vllm_xargs`, and its engine core cannot refuse a request. Fields that vLLM refuses beside
speculation go there, where this project's choice of tokens reads them.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.inference.errors import InvalidRequestError
from specdec.inference.vllm.adoption import Xargs

REFUSED = ("min_p", "logit_bias")
"""Fields of completions and chats that vLLM refuses beside speculation."""


class Door:
    """ASGI middleware before vLLM's application: it answers 400 to wrong `vllm_xargs`, and passes on all else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; read the body of a POST first, and drop the request if its client hangs up meanwhile."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        if scope["path"].endswith("/completions") and any(name.encode() in body for name in REFUSED):
            body = _moved(body)
        if b"vllm_xargs" in body and (fault := _fault(body, scope["app"].state.vllm_config)) is not None:
            error = {"message": fault, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return
        read = iter([{"type": "http.request", "body": body}])

        async def again() -> Message:
            return next(read, None) or await receive()

        await self._app(scope, again, send)


def _moved(body: bytes) -> bytes:
    """Return the body with the `REFUSED` fields in its `vllm_xargs`, as far as it is JSON; others there come first."""
    try:
        document = json.loads(body)
        found = {name: document[name] for name in REFUSED if document.get(name) is not None}
        if "logit_bias" in found:
            found["logit_bias"] = json.dumps(found["logit_bias"])  # vLLM takes no object there
        xargs = {**found, **(document.get("vllm_xargs") or {})}
        document |= {"min_p": 0, "logit_bias": None, "vllm_xargs": xargs}  # 0: else a model's own default counts
    except (ValueError, AttributeError, TypeError, RecursionError):
        return body
    return json.dumps(document).encode() if found else body


def _fault(body: bytes, config: Any) -> str | None:
    """Return what is wrong with this project's fields in a body's `vllm_xargs`; None if nothing is."""
    try:
        Xargs.read(json.loads(body).get("vllm_xargs") or {}, config.model_config.get_vocab_size())
    except InvalidRequestError as exc:
        return str(exc)
    except (ValueError, AttributeError, RecursionError):
        return None
    return None
