"""Door of vLLM's HTTP server (`--middleware`): refuses wrong values of our fields with their names.

vLLM checks none of `vllm_xargs`, and its engine core cannot refuse a request.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from specdec.inference.errors import InvalidRequestError
from specdec.inference.vllm.adoption import Xargs

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class Door:
    """ASGI application before vLLM's, which it gives the same messages."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request; read the body of a POST first."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = b""
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            body += messages[-1].get("body", b"")
        if b"vllm_xargs" in body and (fault := _fault(body, _vocab_size(scope))) is not None:
            await _refuse(fault, send)
            return
        left = iter(messages)

        async def again() -> Message:
            return next(left, None) or await receive()

        await self._app(scope, again, send)


def _vocab_size(scope: Message) -> int:
    return int(scope["app"].state.vllm_config.model_config.get_vocab_size())


def _fault(body: bytes, vocab_size: int) -> str | None:
    """Return what is wrong in the `vllm_xargs` of a body; what else is wrong, vLLM refuses."""
    try:
        Xargs.read(json.loads(body).get("vllm_xargs") or {}, vocab_size)
    except InvalidRequestError as exc:
        return str(exc)
    except (ValueError, AttributeError, RecursionError):
        return None
    return None


async def _refuse(fault: str, send: Send) -> None:
    error = {"message": fault, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
