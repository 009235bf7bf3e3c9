"""Thin client of any OpenAI-compatible server, such as vLLM or llama.cpp. Missing token counts are estimated."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import SSEError, aconnect_sse

from comparison.plan.config import WorkloadConfig
from comparison.plan.endpoint import Endpoint
from comparison.run.client import CONNECT_TIMEOUT_S, NUM_BEST, Step
from comparison.run.record import RequestRecord, Round
from grpc_comm.secured import AUTHORIZATION, watched_token
from grpc_comm.watched import UnusableError
from inference.commit import Timings
from inference.config import DialSecurity
from inference.errors import ConfigError, UnavailableError
from inference.text.chat import Chat

_DIALECTS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},  # vLLM and this project
    {"stream_options": {"include_usage": True}},
    {},
)
"""Ways to ask for token counts, the most detailed first, since a server may refuse unknown fields."""
_REFUSALS = (400, 422)
MAX_SHOWN = 200
"""Characters of a server's error that a message repeats."""
KEEPALIVE_S = 2.0
"""Seconds that an idle connection is kept: fewer than servers keep it, so that no request meets a closed one."""


class HttpError(Exception):
    """Failed request, with its error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Chunk of an answer; `num_tokens` counts the answer so far, None if the server does not report it."""

    arrived_s: float
    text: str
    num_tokens: int | None


class _Answer:
    """Parts of one answer that have arrived."""

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self.num_tokens: int | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.is_complete = False

    def take(self, data: str, arrived_s: float) -> None:
        """Add one event.

        Raises:
            HttpError: the event reports a failure, or is not a chunk.
        """
        try:
            chunk = json.loads(data)
            failure, usage = chunk.get("error"), chunk.get("usage") or {}
            choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
            num_tokens = None if usage.get("completion_tokens") is None else int(usage["completion_tokens"])
            num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
            num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (ValueError, AttributeError, TypeError, OverflowError):
            raise HttpError("BAD_CHUNK", f"no chunk of an answer: {data[:MAX_SHOWN]}") from None
        if failure:
            raise HttpError("IN_STREAM", f"the stream broke off with {str(failure)[:MAX_SHOWN]}")
        self.num_tokens = self.num_tokens if num_tokens is None else num_tokens
        self.num_prompt_tokens = num_prompt_tokens or self.num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens or self.num_cached_tokens
        self.is_complete = self.is_complete or choice.get("finish_reason") is not None
        if text or (num_tokens and choice):
            self.chunks.append(_Chunk(arrived_s, str(text), num_tokens))

    def record(self, prompt_index: int, sent_s: float, model_id: str) -> RequestRecord:
        """Return the record of a complete answer."""
        return RequestRecord(
            prompt_index=prompt_index,
            sent_s=sent_s,
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=(),
            rounds=_rounds(self.chunks, self.num_tokens),
            text="".join(chunk.text for chunk in self.chunks),
            model_id=model_id,
            is_estimated=self.num_tokens is None,
            num_cached_tokens=self.num_cached_tokens,
        )


def _rounds(chunks: Sequence[_Chunk], num_tokens: int | None) -> tuple[Round, ...]:
    """Return a round per chunk: its tokens as counted by the server; else the answer's count spread by characters; else
    one token each. A chunk whose share is no token stays, since TTFT and end to end depend on texts."""
    counts = [chunk.num_tokens for chunk in chunks]
    if is_spread := None in counts:
        chunks = [chunk for chunk in chunks if chunk.text]
        so_far = list(itertools.accumulate(len(chunk.text) for chunk in chunks))
        spread = (round((num_tokens or 0) * characters / so_far[-1]) for characters in so_far)
        counts = list(range(1, len(chunks) + 1)) if num_tokens in (None, len(chunks)) else list(spread)
    new = [now - before for before, now in itertools.pairwise([0, *(count or 0 for count in counts)])]
    return tuple(Round(c.arrived_s, n, 0, 0, Timings()) for c, n in zip(chunks, new, strict=True) if n > 0 or is_spread)


class HttpClient:
    """Client of an OpenAI-compatible server; see `Client`.

    Args:
        http: client with the endpoint's base URL, certificates and token.
    """

    def __init__(self, http: httpx.AsyncClient, endpoint: Endpoint, workload: WorkloadConfig) -> None:
        self._http = http
        self._endpoint = endpoint
        self._workload = workload
        name = endpoint.security.server_name
        self._sni = {} if name is None else {"sni_hostname": name}
        self._dialect = 0
        self._name = ""
        self._model_id = ""

    async def context(self) -> int | None:
        """See `Client`."""
        try:
            answer = await self._http.get("models", timeout=CONNECT_TIMEOUT_S, extensions=self._sni)
            answer.raise_for_status()
            model = answer.json()["data"][0]
            self._name, self._model_id = str(model["id"]), str(model.get("model_id") or "")
            length = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx")
            return None if length is None else int(length)
        except (httpx.HTTPError, ValueError, LookupError, AttributeError, TypeError) as exc:
            what = f"{self._endpoint.url}/models: {exc or type(exc).__name__}"
            raise UnavailableError(f"endpoint {self._endpoint.name} does not name its model at {what}") from exc

    async def count(self, prompt: str | Chat) -> int | None:
        """Return the number of a prompt's tokens; None if the server has no /tokenize, which OpenAI's API lacks."""
        body = {"model": self._name, **_prompt_fields(prompt)}
        try:
            answer = await self._http.post("../tokenize", json=body, timeout=CONNECT_TIMEOUT_S, extensions=self._sni)
            return int(answer.raise_for_status().json()["count"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def complete(self, prompt: str | Chat, prompt_index: int, sent_s: float) -> RequestRecord:
        """See `Client`."""
        try:
            async with asyncio.timeout(self._workload.deadline_s):
                dialects = itertools.count(self._dialect)
                while not await self._ask(prompt, next(dialects), answer := _Answer(), sent_s):
                    pass
                return answer.record(prompt_index, sent_s, self._model_id)
        except TimeoutError:
            code, message = "DEADLINE_EXCEEDED", f"no whole answer within {self._workload.deadline_s:g} s"
        except httpx.ConnectError as exc:
            code, message = "UNREACHABLE", str(exc)
        except httpx.HTTPError as exc:
            code, message = "DISCONNECTED", f"{type(exc).__name__}: {exc}"
        except SSEError as exc:
            code, message = "NO_STREAM", str(exc)
        except HttpError as exc:
            code, message = exc.code, str(exc)
        message = f"endpoint {self._endpoint.name}: {message}"
        return RequestRecord(prompt_index, sent_s, 0, (), (), code, message, failed_s=time.monotonic() - sent_s)

    async def scored(self, prompt: str) -> tuple[str, list[Step]]:
        """See `Client`."""
        body = {**self._body(prompt, len(_DIALECTS) - 1), "stream": False, "logprobs": NUM_BEST}
        try:
            async with asyncio.timeout(self._workload.deadline_s):
                answer = await self._http.post("completions", json=body, extensions=self._sni)
            (choice,) = answer.raise_for_status().json()["choices"]
            scores = choice["logprobs"]
            chosen = zip(scores["tokens"], scores["token_logprobs"], strict=True)
            columns = zip(scores["text_offset"], chosen, scores["top_logprobs"], strict=True)
            return choice["text"], [Step(offset, (own, *best.items())) for offset, own, best in columns]
        except (TimeoutError, httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
            return "", []

    async def _ask(self, prompt: str | Chat, dialect: int, answer: _Answer, sent_s: float) -> bool:
        """Return True after an answer, False if the server refused this dialect. An accepted dialect is kept."""
        path, body = "completions" if isinstance(prompt, str) else "chat/completions", self._body(prompt, dialect)
        async with aconnect_sse(self._http, "POST", path, json=body, extensions=self._sni) as source:
            status = source.response.status_code
            if status in _REFUSALS and dialect + 1 < len(_DIALECTS):
                return False
            if status != 200:
                text = (await source.response.aread()).decode(errors="replace")
                raise HttpError(str(status), f"HTTP {status}: {text[:MAX_SHOWN]}")
            self._dialect = dialect
            async for event in source.aiter_sse():
                if event.data == "[DONE]":
                    break
                if event.data:  # an event with only a retry time has none
                    answer.take(event.data, time.monotonic() - sent_s)
        if not answer.is_complete:
            raise HttpError("CUT_OFF", "the stream ended without a finish_reason")
        if not answer.chunks:
            raise HttpError("EMPTY", "the answer has no text")
        return True

    def _body(self, prompt: str | Chat, dialect: int) -> dict[str, Any]:
        workload = self._workload
        fields: dict[str, Any] = {"max_tokens": workload.max_new_tokens, "temperature": workload.temperature}
        fields |= {"seed": workload.seed} if dialect + 1 < len(_DIALECTS) else {}
        fields |= {"ignore_eos": True} if workload.ignore_eos else {}  # vLLM, llama.cpp and this project
        return {"model": self._name, **_prompt_fields(prompt), **fields, "stream": True, **_DIALECTS[dialect]}


def _prompt_fields(prompt: str | Chat) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"messages": [{"role": each.role, "content": each.content} for each in prompt.messages]}


@asynccontextmanager
async def http_client(endpoint: Endpoint, workload: WorkloadConfig) -> AsyncGenerator[HttpClient, None]:
    """Yield a client that knows the model's name. It ignores proxies and credentials of the environment.

    Raises:
        ConfigError: a file with certificates or the token cannot be used.
        UnavailableError: the server cannot be reached.
    """
    async with httpx.AsyncClient(
        base_url=f"{endpoint.url}/",
        **_shown(endpoint.security),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        trust_env=False,
    ) as http:
        client = HttpClient(http, endpoint, workload)
        await client.context()
        yield client


def _shown(security: DialSecurity) -> dict[str, Any]:
    """Return httpx's arguments for certificates and token; without a CA, the system's CAs are trusted."""
    try:
        context = ssl.create_default_context(cafile=security.ca)
        if security.cert is not None:
            context.load_cert_chain(security.cert, security.key)
    except OSError as exc:  # ssl.SSLError is one, too
        raise ConfigError(f"certificates for an endpoint cannot be used: {exc}") from exc
    if security.token_file is None:
        return {"verify": context}
    try:
        return {"verify": context, "headers": {AUTHORIZATION: f"Bearer {watched_token(security.token_file).get()}"}}
    except (UnusableError, OSError) as exc:
        raise ConfigError(str(exc)) from exc
