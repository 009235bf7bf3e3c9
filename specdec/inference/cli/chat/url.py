"""Speaker that asks any server with OpenAI's HTTP API, at its base URL."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from specdec.inference.cli.chat.speakers import Messages, Options, Piece, Pieces, Speaker
from specdec.inference.config import ConnectionConfig, DialSecurity
from specdec.inference.errors import ConfigError, UnavailableError
from specdec.inference.workers.calls.dialling import web_credentials

MAX_SHOWN = 500
"""Most characters of a server's error message that are shown."""
_Pending: TypeAlias = AbstractAsyncContextManager[aiohttp.ClientResponse]


@asynccontextmanager
async def url_speaker(url: str, name: str | None, link: ConnectionConfig) -> AsyncGenerator[Speaker, None]:
    """Yield a speaker that asks the API at a base URL.

    Args:
        name: name of the model; None takes the first in the API's list.
        link: settings of the connection, of which the security and the deadline are used.

    Raises:
        ConfigError: the URL is not valid, or prompts would go there in plain text.
        UnavailableError: there is no such API, or no such model.
    """
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ConfigError(f"--url {url!r} is not valid: http(s)://HOST:PORT/v1 is expected")
    if where.scheme == "http":  # where a CA would encrypt nothing
        DialSecurity(token_file=link.security.token_file, insecure=link.security.insecure).check(f"{where.hostname}:80")
    headers, context = web_credentials(link.security)
    web, timeout = aiohttp.TCPConnector(ssl=context), aiohttp.ClientTimeout(link.deadline_s)
    async with aiohttp.ClientSession(f"{url.rstrip('/')}/", connector=web, headers=headers, timeout=timeout) as http:
        async with _answered(http.get("models")) as response:
            models = {str(model["id"]): model for model in (await response.json())["data"]}
            model = models[name or next(iter(models), "")]
        yield partial(_ask, http, model)


async def _ask(http: aiohttp.ClientSession, model: Mapping[str, Any], messages: Messages, options: Options) -> Pieces:
    # Other servers, which do not list this, may refuse a field of ours.
    ours = {"stream_options": {"include_speculation": True}} if "has_chat_template" in model else {}
    body = {"model": model["id"], "messages": messages, "stream": True, **ours, **options}
    async with _answered(http.post("chat/completions", json=body)) as response:
        async for line in response.content:
            if line.startswith(b"data:") and (data := line[len(b"data:") :].strip()) != b"[DONE]":
                chunk = json.loads(data)
                if "error" in chunk:
                    raise UnavailableError(str(chunk["error"])[:MAX_SHOWN])
                delta = (chunk.get("choices") or [{}])[0].get("delta") or {}
                accepted = all((chunk.get("speculation") or {}).get("accepted") or [False])
                yield Piece(delta.get("reasoning_content") or delta.get("reasoning") or "", True, accepted)
                yield Piece(delta.get("content") or "", False, accepted)


@asynccontextmanager
async def _answered(request: _Pending) -> AsyncGenerator[aiohttp.ClientResponse, None]:
    """Send a request and yield its response.

    Raises:
        UnavailableError: no response came, it has an error status, or the block found that it is not in OpenAI's form.
    """
    try:
        async with request as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:MAX_SHOWN]
                raise UnavailableError(f"{response.url} answers {response.status}: {text}")
            yield response
    except (aiohttp.ClientError, OSError, ValueError, LookupError, AttributeError, TypeError) as exc:
        raise UnavailableError(f"no answer as OpenAI's API has it: {exc or type(exc).__name__}") from exc
