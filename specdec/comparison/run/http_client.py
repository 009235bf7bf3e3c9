"""Thin client of any OpenAI-compatible server, such as vLLM or llama.cpp. Missing token counts are estimated."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from specdec.comparison.plan.config import WorkloadConfig
from specdec.comparison.plan.endpoint import Endpoint
from specdec.comparison.plan.record import RequestRecord, Round
from specdec.comparison.run.client import CONNECT_TIMEOUT_S, NUM_BEST, Step
from specdec.inference.commit import Timings
from specdec.inference.errors import UnavailableError
from specdec.inference.text.chat import Chat
from specdec.inference.workers.calls.dialling import web_credentials

_DIALECTS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},  # vLLM and this project
    {"stream_options": {"include_usage": True}},
    {},
)
"""Ways to ask for token counts, the most detailed first, since a server may refuse unknown fields."""
_REFUSALS = (400, 422)
_UNUSABLE = (aiohttp.ClientError, TimeoutError, ValueError, LookupError, AttributeError, TypeError)
"""Exceptions raised for a request that fails, or whose answer has an unexpected form."""
EVENT_STREAM = "text/event-stream"
MAX_SHOWN = 200
"""Most characters of a server's error text that our error message repeats."""
KEEPALIVE_S = 2.0
"""Seconds that an idle connection is kept: fewer than servers keep it, so that no request meets a closed one."""

END_S = 0.2
"""Seconds that a stream may stay open after its last event. After them the connection is closed, not reused."""


class HttpError(Exception):
    """Failed request, with a code for the table of failures: the HTTP status, or a word such as "CUT_OFF"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Chunk of an answer.

    Attributes:
        arrived_s: seconds since the request's start.
        num_tokens: tokens of the answer up to this chunk; None if the server does not report it.
    """

    arrived_s: float
    text: str
    num_tokens: int | None


class EventReader:
    """Incremental reader of a stream of server-sent events. It returns their data, and ignores all other fields."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[str]:
        """Return the data of each event that this part of the stream completes; an event without data is left out."""
        *lines, self._rest = _LINE_END.split(self._rest + part)
        return [data for line in lines if (data := self._take(line)) is not None]

    def _take(self, line: bytes) -> str | None:
        """Take one line of the stream; return an event's data if this is the empty line that ends the event, else None.

        An event without data is ignored.
        """
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        if line or not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        return data.decode(errors="replace") or None


_LINE_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)
"""End of a line. A carriage return at the end of a part waits for the next part, which may begin with a line feed."""


class _Arrived:
    """Parts of one HTTP answer that have arrived so far.

    Args:
        due_s: monotonic seconds that count as the request's start; None: when it leaves.

    Attributes:
        sent_s: monotonic seconds of the request's start.
        num_tokens: latest count of the answer's tokens; None if the server has reported none.
        is_complete: whether a chunk has had a finish_reason.
    """

    def __init__(self, due_s: float | None = None) -> None:
        self._due_s = due_s
        self.sent_s = time.monotonic() if due_s is None else due_s
        self.chunks: list[_Chunk] = []
        self.num_tokens: int | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.is_complete = False

    def leave(self) -> None:
        """Record that the request leaves now, since its wait for a connection is not the server's time.

        A request with a due time keeps that as its start.
        """
        self.sent_s = time.monotonic() if self._due_s is None else self._due_s

    def take(self, data: str, arrived_s: float) -> None:
        """Add the data of one server-sent event to the answer.

        Args:
            data: data of the event.
            arrived_s: when it arrived, in seconds since the start of the request.

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

    def record(self, prompt_index: int, model_id: str) -> RequestRecord:
        """Return the record of a complete answer."""
        return RequestRecord(
            prompt_index=prompt_index,
            sent_s=self.sent_s,
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=(),
            rounds=_rounds(self.chunks, self.num_tokens),
            text="".join(chunk.text for chunk in self.chunks),
            model_id=model_id,
            is_estimated=self.num_tokens is None,
            num_cached_tokens=self.num_cached_tokens,
        )


def _rounds(chunks: Sequence[_Chunk], num_tokens: int | None) -> tuple[Round, ...]:
    """Return a round per chunk, with the number of tokens in it.

    If the server reports a count in each chunk, these counts are used, and chunks without a new token are dropped. If
    it reports only one for the whole answer, these tokens are spread over the chunks of text by their characters; if it
    reports none, each chunk of text is one token. In these two cases no chunk of text is dropped, since the time of the
    first one is the TTFT.
    """
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
        http: session with the endpoint's base URL, certificates and token.
    """

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint, workload: WorkloadConfig) -> None:
        self._http = http
        self._endpoint = endpoint
        self._workload = workload
        self._dialect = 0
        self._name = ""
        self._model_id = ""

    async def context(self) -> int | None:
        """Connect; return the limit of prompt and answer together in tokens, None if the server does not report it.

        Raises:
            UnavailableError: the server cannot be reached, or does not name its model.
        """
        try:
            model = (await self._json("GET", "models", CONNECT_TIMEOUT_S))["data"][0]
            self._name, self._model_id = str(model["id"]), str(model.get("model_id") or "")
            length = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx")
            return None if length is None else int(length)
        except _UNUSABLE as exc:
            what = f"{self._endpoint.url}/models: {str(exc) or type(exc).__name__}"
            raise UnavailableError(f"endpoint {self._endpoint.name} does not name its model at {what}") from exc

    async def count(self, prompt: str | Chat) -> int | None:
        """Return the number of a prompt's tokens; None if the server has no /tokenize, which OpenAI's API lacks."""
        body = {"model": self._name, **_prompt_fields(prompt)}
        try:
            return int((await self._json("POST", "../tokenize", CONNECT_TIMEOUT_S, body))["count"])
        except _UNUSABLE:
            return None

    async def complete(self, prompt: str | Chat, prompt_index: int, due_s: float | None) -> RequestRecord:
        """Send one prompt, and return the record of its answer; a failure is recorded, not raised.

        Args:
            prompt_index: number of the prompt in its set, for the record.
            due_s: monotonic seconds that count as the request's start; None: the moment when it leaves.
        """
        began_s = time.monotonic() if due_s is None else due_s
        try:
            async with asyncio.timeout(self._workload.deadline_s):
                dialects = itertools.count(self._dialect)
                while not await self._ask(prompt, next(dialects), answer := _Arrived(due_s)):
                    pass
                return answer.record(prompt_index, self._model_id)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            code, message = "UNREACHABLE", str(exc)
        except TimeoutError:
            code, message = "DEADLINE_EXCEEDED", f"no whole answer within {self._workload.deadline_s:g} s"
        except aiohttp.ClientError as exc:
            code, message = "DISCONNECTED", f"{type(exc).__name__}: {exc}"
        except HttpError as exc:
            code, message = exc.code, str(exc)
        message = f"endpoint {self._endpoint.name}: {message}"
        return RequestRecord(prompt_index, began_s, 0, (), (), code, message, failed_s=time.monotonic() - began_s)

    async def scored(self, prompt: str) -> tuple[str, list[Step]]:
        """Return the text of the answer to a prompt, and a step for each token; both are empty after a failure."""
        body = {**self._body(prompt, len(_DIALECTS) - 1), "stream": False, "logprobs": NUM_BEST}
        try:
            (choice,) = (await self._json("POST", "completions", self._workload.deadline_s, body))["choices"]
            scores = choice["logprobs"]
            chosen = zip(scores["tokens"], scores["token_logprobs"], strict=True)
            columns = zip(scores["text_offset"], chosen, scores["top_logprobs"], strict=True)
            return choice["text"], [Step(offset, (own, *best.items())) for offset, own, best in columns]
        except _UNUSABLE:
            return "", []

    async def _json(self, method: str, path: str, timeout_s: float, body: object = None) -> Any:
        """Return the JSON of an answer; raise one of `_UNUSABLE` if the request fails or its status is not 200."""
        async with asyncio.timeout(timeout_s), self._request(method, path, body) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}: {await _shown_text(answer)}")
            return await answer.json(content_type=None)

    def _request(
        self, method: str, path: str, body: object, answer: _Arrived | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request. Redirects are not followed, since the access token is only for the endpoint.

        Args:
            answer: object to which to report when the request leaves; None if nothing measures it.
        """
        name = self._endpoint.security.server_name
        return self._http.request(
            method, path, json=body, server_hostname=name, allow_redirects=False, trace_request_ctx=answer
        )

    async def _ask(self, prompt: str | Chat, dialect: int, answer: _Arrived) -> bool:
        """Send a prompt, and read its whole answer into `answer`; return True.

        Return False if the server refuses the way in which `dialect`, an index of `_DIALECTS`, asks for token counts.

        Raises:
            HttpError: the request fails, or the stream is cut off or has no text.
        """
        path, body = "completions" if isinstance(prompt, str) else "chat/completions", self._body(prompt, dialect)
        async with self._request("POST", path, body, answer) as response:
            if response.status in _REFUSALS and dialect + 1 < len(_DIALECTS):
                return False
            if response.status != 200:
                raise HttpError(str(response.status), f"HTTP {response.status}: {await _shown_text(response)}")
            if response.content_type != EVENT_STREAM:
                raise HttpError("NO_STREAM", f"the answer is {response.content_type}, not {EVENT_STREAM}")
            self._dialect = dialect
            await _read(response.content, answer)
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


async def _read(content: aiohttp.StreamReader, answer: _Arrived) -> None:
    """Read an answer up to its last event into `answer`, and then the rest of the stream if it ends soon.

    A connection can be reused only if its stream was read to the end.
    """
    events = EventReader()
    async for part in content.iter_any():
        arrived_s = time.monotonic() - answer.sent_s
        for data in events.feed(part):
            if data == "[DONE]":
                with suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(END_S):
                        await content.read()
                return
            answer.take(data, arrived_s)


async def _leave(_: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestChunkSentParams) -> None:
    """Record that a request leaves now; aiohttp calls this when it is about to write header and body."""
    if isinstance(answer := context.trace_request_ctx, _Arrived):
        answer.leave()


async def _shown_text(answer: aiohttp.ClientResponse) -> str:
    return (await answer.read()).decode(errors="replace")[:MAX_SHOWN]


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
    headers, context = web_credentials(endpoint.security)
    connector = aiohttp.TCPConnector(limit=0, ssl=context, keepalive_timeout=KEEPALIVE_S)
    timeout, timing = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S), aiohttp.TraceConfig()
    timing.on_request_chunk_sent.append(_leave)
    async with aiohttp.ClientSession(
        f"{endpoint.url}/", connector=connector, headers=headers, timeout=timeout, trace_configs=[timing]
    ) as http:
        client = HttpClient(http, endpoint, workload)
        await client.context()
        yield client
