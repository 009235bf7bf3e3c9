"""Middleware of vLLM's HTTP server (`--middleware`): it refuses a wrong `gamma` by its name, and lets `min_p` pass.

vLLM checks none of `vllm_xargs`, and its engine core cannot refuse a request. It refuses `min_p` and `logit_bias`
beside speculation, by which its own texts would be others.
"""

from __future__ import annotations

import json

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.inference.errors import InvalidRequestError
from specdec.inference.vllm.adoption import gamma_of


class Door:
    """ASGI middleware before vLLM's application: it answers 400 to wrong `vllm_xargs`, and passes on all else."""

    def __init__(self, app: ASGIApp) -> None:
        from vllm.sampling_params import SamplingParams

        self._app = app
        SamplingParams._validate_spec_decode = lambda self, speculative_config: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; read the body of a POST first, and drop the request if its client hangs up meanwhile."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        if b"vllm_xargs" in body and (fault := _fault(body)) is not None:
            error = {"message": fault, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return
        read = iter([{"type": "http.request", "body": body}])

        async def again() -> Message:
            return next(read, None) or await receive()

        await self._app(scope, again, send)


def _fault(body: bytes) -> str | None:
    """Return what is wrong with `gamma` in a body's `vllm_xargs`; None if nothing is."""
    try:
        gamma_of(json.loads(body).get("vllm_xargs") or {})
    except InvalidRequestError as exc:
        return str(exc)
    except (ValueError, AttributeError, RecursionError):
        return None
    return None
