"""Limits on the size and time of HTTP requests, and the health probes of a process."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop

from specdec.inference.caller import request_id
from specdec.inference.commit import TextEvent
from specdec.inference.config import ServerConfig
from specdec.inference.gateway import requests
from specdec.inference.gateway.answers import stream
from specdec.inference.gateway.app import HttpFront
from specdec.inference.gateway.bodies.schema import CompletionBody
from specdec.inference.gateway.door import middleware, protocol
from specdec.inference.gateway.door.middleware import parse_fault
from specdec.inference.gateway.door.port import Probes
from specdec.inference.request import Provenance
from specdec.inference.serving.host import opened
from specdec.inference.serving.processes import free_port
from specdec.inference.text import structured
from specdec.inference.workers.calls.access import Access
from specdec.inference.workers.completion import CompletionRequest
from tests.support.completers import ScriptedCompleter, gateway
from tests.support.ports import entry, token_of
from tests.support.scripted import until

BODY = CompletionBody.model_validate({"prompt": "x"})


@asynccontextmanager
async def serving(
    passes: list[list[str]] | ScriptedCompleter, *, stall_timeout_s: float = 30.0, access: Access | None = None
) -> AsyncGenerator[tuple[int, HttpFront], None]:
    completer = passes if isinstance(passes, ScriptedCompleter) else ScriptedCompleter(passes)
    config = ServerConfig(stall_timeout_s=stall_timeout_s)
    front = HttpFront(gateway(completer, port=(port := free_port())), config, access=access)
    async with opened(front):
        yield port, front


@asynccontextmanager
async def dialled(port: int, first: bytes) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Open a connection to the port, and send `first` on it; yield the connection's reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(first)
        yield reader, writer
    finally:
        writer.close()


def posted(body: bytes, *fields: str, num_bytes: int | None = None) -> bytes:
    """Return the bytes of a completion request with header lines `fields`; `num_bytes` may declare a longer body."""
    length = len(body) if num_bytes is None else num_bytes
    known = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*known, f"Content-Length: {length}", *fields, "\r\n")).encode() + body


FULL: list[dict[str, Any]] = [
    {"prompt": [7] * 100},
    {"prompt": "a" * 100_000},
    {"prompt": [[1.0] * 100] * 64},
    {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1024)}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5}] * 1024},
]


@pytest.mark.parametrize("document", FULL)
async def test_a_full_body_passes(document: dict[str, Any]) -> None:
    path = "chat/completions" if "messages" in document else "completions"
    async with serving([["a"]]) as (port, _), httpx.AsyncClient(timeout=60) as client:
        assert (await client.post(f"http://127.0.0.1:{port}/v1/{path}", json=document)).status_code == 200


@pytest.mark.parametrize(
    ("path", "document", "words"),
    [
        ("v1/completions", {"prompt": [7] * 2000}, ("prompt", "128", "2000")),
        ("detokenize", {"tokens": [7] * 2000}, ("tokens", "128", "2000")),
        ("v1/completions", {"prompt": [7] * 70_000}, ("65536 numbers",)),
        ("v1/completions", {"prompt": "x", "guided_json": {"enum": [[7] * 1000] * 70}}, ("65536 numbers",)),
        ("v1/completions", {"prompt": "x", "stop_token_ids": [7] * 2000}, ("stop_token_ids", "256", "2000")),
        ("v1/completions", {"prompt": "x", **{f"f{i}": 0 for i in range(2000)}}, ("2001", "1024")),
        ("v1/completions", {"prompt": "x", "logit_bias": {str(i): "x" for i in range(2000)}}, ("logit_bias", "1024")),
        ("v1/completions", {"prompt": ["a", *[[0] * 100] * 600]}, ("prompt", "expected")),
        ("v1/chat/completions", {"messages": [{"role": "u", "content": "x"}] * 2000}, ("messages", "1024", "2000")),
        ("v1/chat/completions", {"messages": [{"role": "u", "content": [0] * 2000}]}, ("messages.0.content.0: ",)),
    ],
    ids=["prompt", "tokens", "numbers", "of a schema", "stop ids", "fields", "biases", "prompts", "messages", "parts"],
)
async def test_too_many_items_are_refused_by_field_and_limit(path: str, document: object, words: list[str]) -> None:
    """A body with too many items is refused with the field and the limit, before it is serialized.

    Regression: a schema with a million numbers was serialized, in 0.1 s, before its length was checked. And
    1.9 MB of wrong items became a million error objects, which took 1.5 GB of memory and 10 s of the event loop.
    """
    async with serving([["a"]]) as (port, _), httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/{path}", json=document)
    assert (answer.status_code, len(answer.text) < 400) == (400, True)  # not a message per item
    assert all(word in answer.json()["error"]["message"] for word in words), answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b",".join(b'"f%d":0' % i for i in range(100_000)) + b"}",
        b"[" + b"[]," * 200_000 + b"[]]",
        b'{"prompt":[' + b"7," * 1_100_000 + b"7]}",
        '["\u2200",{}]'.encode("utf-16"),
    ],
    ids=["members", "lists", "numbers", "UTF-16, whose bytes hide quotes"],
)
def test_bodies_that_are_dear_to_parse_are_refused_unparsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that would take long to parse is refused without being parsed.

    Regression: json.loads of 8 MB of members froze all streams and health checks of a gateway for 0.4 s.
    """
    monkeypatch.setattr(json, "loads", None)
    assert parse_fault(body, 1_000_000) is not None


def test_a_string_without_an_end_is_read_once() -> None:
    """Checking a body with an unterminated string takes linear time.

    Regression: a search for the string's end from each of its two million quotes took hours.
    """
    began = time.monotonic()
    parse_fault(b'"\\' * 2_000_000, 1_000_000)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{{"prompt": "x", "vllm_xargs": {}}}'),
        ("/v1/completions", '{{"prompt": "x", "guided_json": {}}}'),
        ("/v1/completions", '{{"prompt": "x", "metadata": {}}}'),
        ("/v1/chat/completions", '{{"messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {}}}'),
    ],
)
async def test_deep_nesting_is_the_clients_fault(path: str, body: str) -> None:
    """A body that is nested too deeply gets status 400.

    Regression: Python parsed such a body but could not serialize it, so it got status 500 and a traceback of
    1,000 lines.
    """
    async with serving([["a"]]) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for depth in range(850, 1000, 10):
            nested = '{"a":' * depth + "1" + "}" * depth
            answer = await client.post(path, content=body.format(nested), headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 400), (depth, answer.text)


async def test_a_grammar_is_written_down_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is serialized only once for all choices (n) of a request.

    Regression: a schema was serialized 64 times 64 times, in 7 s, before the limit of 128 choices was checked.
    """
    num_written, write = 0, structured.only_grammar

    def counted(given: Any) -> Any:
        nonlocal num_written
        num_written += 1
        return write(given)

    monkeypatch.setattr(structured, "only_grammar", counted)
    fields = {"n": 64, "guided_json": {"enum": ["a", "b"]}}
    async with serving([["a"]]) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        refused = await client.post("/v1/completions", json={"prompt": ["x"] * 64, **fields})
        assert (refused.status_code, "4096 choices" in refused.text, num_written) == (400, True, 1)
        answer = await client.post("/v1/completions", json={"prompt": ["x", "y"], **fields})
    assert (answer.status_code, len(answer.json()["choices"]), num_written) == (200, 128, 2)


async def closed_after(port: int, first: bytes, more: bytes = b"") -> float:
    """Send `first`, then `more` again and again; return the seconds until the server closes the connection."""
    began = time.monotonic()
    async with dialled(port, first) as (reader, writer):

        async def flood() -> None:
            while more:
                writer.write(more)
                await writer.drain()

        flooding = asyncio.create_task(flood())
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                while await reader.read(65536):
                    pass
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", b""),
        (b"GET /health HTTP/1.1\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
        (b"GET /health HTTP/1.1\r\nx: ", b"a" * 1000),
    ],
    ids=["silent", "no end of headers", "no end of the body", "many headers", "one long header"],
)
async def test_a_connection_without_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, first: bytes, more: bytes
) -> None:
    """A connection on which no complete request comes is closed after a time.

    `first` is sent once, and then `more` again and again.

    Regression: 1500 silent connections stayed open for ever, and headers without an end filled the memory.
    """
    monkeypatch.setattr(protocol, "HEADERS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(protocol, "BODY_TIMEOUT_S", 0.3)
    async with serving([["a"]]) as (port, _):
        assert await closed_after(port, first, more) < 10


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1:8000", "[::1]", "[::1]:8000"])
async def test_names_of_this_machine_are_served(host: str) -> None:
    async with serving([["a"]]) as (port, _), httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/v1/models", headers={"Host": host})
        assert answer.status_code == 200


@pytest.mark.parametrize("host", ["llm.example.org", "localhost.example.org:80", "127.0.0.1.example.org", "x" * 5000])
async def test_another_host_gets_the_way_out(host: str) -> None:
    """A request with an unknown Host header gets an error that names the accepted hosts.

    Regression: a proxy's Host header was refused with the plain text "Invalid host header", and without a
    log.
    """
    async with serving([["a"]]) as (port, _), httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/v1/models", headers={"Host": host})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "Host", "invalid_host")
    assert host.removesuffix(":80")[:50] in error["message"]
    assert "Host: localhost" in error["message"]
    assert len(error["message"]) < 500


async def test_a_compressed_body_gets_the_way_out() -> None:
    """The error about a compressed body says that it is compressed, and to send it uncompressed.

    Regression: the compressed bytes were parsed as JSON, and the error named one of their characters.
    """
    body, json_type = gzip.compress(b'{"prompt": "x"}'), {"Content-Type": "application/json"}
    async with serving([["a"]]) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1/") as client:
        headers = {**json_type, "Content-Encoding": "gzip"}
        error = (refused := await client.post("completions", content=body, headers=headers)).json()["error"]
        assert (refused.status_code, error["code"]) == (415, "unsupported_content_encoding")
        assert "send the body as it is" in error["message"]
        headers = {**json_type, "Content-Encoding": "identity"}
        assert (await client.post("completions", content=b'{"prompt": "x"}', headers=headers)).status_code == 200


@pytest.mark.parametrize("part", [b'{"prompt": "x"}', b'{"pro'], ids=["after the body", "within it"])
async def test_a_half_closed_client_gets_the_way_out(part: bytes) -> None:
    """A client that closes its sending side before the answer gets an error that tells it to leave that open.

    Regression: a client that closes its sending side got no answer, since that counts as leaving.
    """
    completer = ScriptedCompleter([["a"]], gap_s=30.0)
    async with serving(completer) as (port, _), dialled(port, posted(part, num_bytes=15)) as (reader, writer):
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60)
        await until(lambda: completer.num_running == 0)
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert (error["code"], "leave it open" in error["message"]) == ("half_closed", True)


async def test_connections_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections above a limit are closed at once; those within it continue."""
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 1)
    async with serving([["a"]]) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/livez")).status_code == 200
        assert await closed_after(port, b"") < protocol.HEADERS_TIMEOUT_S / 2
        assert (await client.get("/livez")).status_code == 200


async def test_a_connection_has_a_limit_of_requests_that_wait() -> None:
    """A connection is closed if too many of its requests wait for their turn (HTTP pipelining).

    Regression: 14,000 requests of one connection came in one read, and separating them took 0.2 s of the
    event loop.
    """
    async with serving([["a"]]) as (port, _):
        one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert await closed_after(port, one * 5000) < 10
        async with dialled(port, one * protocol.MAX_PIPELINED) as (reader, _):
            for _ in range(protocol.MAX_PIPELINED):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


def test_a_limit_that_closes_ends_the_answer_silently(caplog: pytest.LogCaptureFixture) -> None:
    """If a limit closes a connection during an answer, the answer ends without an error in the log.

    Regression: the server went on writing after the close, and uvloop's RuntimeError filled 90 log lines.
    """
    one = posted(b'{"prompt": "x", "stream": true, "max_tokens": 64}')

    async def attack() -> None:
        async with serving([["a"]] * 64) as (port, _):
            for _ in range(20):
                async with dialled(port, one) as (reader, writer):
                    await reader.readuntil(b"data:")
                    writer.write(one * 200)
                    await asyncio.wait_for(reader.read(), 60)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(attack())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"X-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize("beside", [b"0\r\nx: ", b"1;"], ids=["after the body", "beside a chunk"])
async def test_fields_beside_a_body_have_header_limits(beside: bytes) -> None:
    """Trailer fields after a body, and extensions of its chunks, have the limits of headers.

    Regression: fields after a body had no limit, and a cost that grows with the square of their length.
    """
    async with serving([["a"]]) as (port, _):
        assert await closed_after(port, CHUNKED + beside, b"a" * 65536) < 15  # the body's own time is 30 s


async def test_fields_after_a_body_are_no_headers() -> None:
    """Trailer fields after a body do not count as headers.

    Regression: they counted as headers, so a request could change its access token behind a proxy that had
    checked it.
    """
    body = b'{"prompt": "x"}'
    fields = b"X-Request-Id: forged\r\nX-Deadline-S: nonsense\r\nConnection: close\r\n\r\n"
    request = CHUNKED + b"%x\r\n%b\r\n0\r\n%b" % (len(body), body, fields)
    async with serving([["a"]]) as (port, _), dialled(port, request) as (reader, _):
        answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"x-request-id: mine\r\n" in answer


@pytest.mark.parametrize("name", ["Host", "Authorization", "X-Api-Key"])
async def test_a_request_has_one_host_and_one_token(name: str) -> None:
    """A request with two Host headers or two access tokens is refused.

    Regression: the first of two Host headers and the last of two tokens counted, while a proxy may check the
    others.
    """
    given = b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\nX-Api-Key: one\r\n"
    async with serving([["a"]]) as (port, _), dialled(port, given + b"\r\n") as (reader, writer):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"%b%b: other\r\n\r\n" % (given, name.encode()))
        assert b"HTTP/1.1 400 " in await reader.read()


@pytest.mark.parametrize("has_accounts", [True, False])
async def test_bodies_that_have_not_ended_have_a_total(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_accounts: bool
) -> None:
    """Unfinished bodies of all requests together have a limit of memory; here it allows two and refuses a third.

    Regression: unfinished bodies of one account took 1.2 GB.
    """
    size, auth_file = 90_000, tmp_path / "auth.toml"
    auth_file.write_text(entry("mallory", "client") + entry("alice", "client"))
    monkeypatch.setattr(middleware, "MAX_UNFINISHED_BYTES", size * 5 // (1 if has_accounts else 2))
    access = Access(auth_file) if has_accounts else None
    async with serving([["a"]], access=access) as (port, _), AsyncExitStack() as stack, asyncio.timeout(60):

        async def begun(account: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            """Send a request without the last byte of its body; return its connection."""
            fields = (f"Authorization: Bearer {token_of(account)}", "Connection: close")
            request = posted(b'{"prompt": "x"'.ljust(size - 1), *fields, num_bytes=size)
            return await stack.enter_async_context(dialled(port, request))

        flood = [await begun("mallory") for _ in range(3)]
        answers = {asyncio.create_task(reader.read()): writer for reader, writer in flood}
        (refused,), waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        if has_accounts:
            reader, writer = await begun("alice")
            answers[asyncio.create_task(reader.read())] = writer
        for answer, writer in answers.items():
            if answer is not refused:
                writer.write(b"}")
        statuses = {answer: (await answer).split(b" ", 2)[1] for answer in answers}
    assert statuses.pop(refused) == b"503"
    assert b"\r\nretry-after: 30\r\n" in refused.result()
    assert [*statuses.values()] == [b"200"] * (len(waiting) + has_accounts)


@pytest.mark.parametrize("begun", [b"GET /vers", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"])
async def test_a_partial_request_keeps_the_answer_before(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """A partial next request on a connection does not end the answer that is being sent.

    Regression: the time limit of a client's next request ran during the answer, and cut a stream after 10 s.
    """
    monkeypatch.setattr(protocol, "HEADERS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(protocol, "BODY_TIMEOUT_S", 0.2)
    request = posted(b'{"prompt": "x", "stream": true}')
    async with (
        serving(ScriptedCompleter([["a"]] * 10, gap_s=0.1)) as (port, _),
        asyncio.timeout(60),
        dialled(port, request) as (reader, writer),
    ):
        await reader.readuntil(b"data: ")
        writer.write(begun)
        answer = await reader.read()
    assert b"[DONE]" in answer


async def test_requests_of_one_connection_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one connection have context variables of their own.

    Regression: a connection kept the context variables of a long request, so all later requests joined its
    trace.
    """
    found: list[str] = []
    answer = Probes.__call__

    async def looking(self: Probes, scope: Any, receive: Any, send: Any) -> None:
        found.append(request_id())
        await answer(self, scope, receive, send)

    monkeypatch.setattr(Probes, "__call__", looking)
    async with serving([["a"]]) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await client.post("/v1/completions", json={"prompt": "a" * 300_000}, headers={"X-Request-Id": "first"})
        await client.get("/version")
    assert found == ["", ""]


@pytest.mark.parametrize("limit", ["stall_timeout_s", "X-Deadline-S"])
async def test_a_reader_that_stands_still_is_dropped(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops reading is dropped: after the server's stall timeout, or at its request's own deadline.

    Regression: the deadline was checked between events only, so a reader that stood still was never late.
    """
    monkeypatch.setattr(stream, "LAST_WORD_S", 0.1)
    completer = ScriptedCompleter([["x" * 200_000]] * 100)  # 20 MB: more than what kernels keep for a connection
    stalls = limit == "stall_timeout_s"
    async with serving(completer, stall_timeout_s=0.5 if stalls else 30.0) as (port, _):
        request = posted(b'{"prompt": "a", "stream": true}', *(() if stalls else ("X-Deadline-S: 0.5",)))
        async with dialled(port, request):
            await until(lambda: completer.num_running == 1)
            await until(lambda: completer.num_running == 0)


async def test_probes_separate_a_restart_from_a_pause() -> None:
    """Probes distinguish a server that needs a restart from a server that only takes no requests now.

    Regression: /ping, which SageMaker calls, was 200 for a server that drained or had a broken engine.
    """
    async with serving([["a"]]) as (port, front), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

        async def probes() -> list[int]:
            return [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/health", "/ping")]

        assert await probes() == [200, 200, 200, 200]
        front.report(ready=False)
        assert await probes() == [200, 503, 503, 503]
        front.report(ready=False, alive=False)
        assert await probes() == [503, 503, 503, 503]
        front.report(ready=True)
        assert await probes() == [200, 200, 200, 200]


async def test_a_server_that_is_not_ready_ends_its_connections() -> None:
    """A server that is not ready ends its connections after their answers.

    Regression: clients kept connections to a gateway that was shutting down, and lost the requests that they were
    sending when it ended.
    """
    body = {"prompt": "a"}
    async with serving([["a"]]) as (port, front), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert "connection" not in (await client.post("/v1/completions", json=body)).headers
        front.report(ready=False)
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")


async def test_unread_choices_wait_for_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client does not read, the choices of its answer are not generated further until it does.

    Regression: 128 choices of an unread answer were generated to their ends, and their events took 0.8 GB.
    """
    monkeypatch.setattr(requests, "MAX_UNREAD", 10)
    completer = ScriptedCompleter([["x"]] * 5000)
    taken = 0

    async def counting(request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        nonlocal taken
        async with aclosing(completer.complete(request)) as events:
            async for event in events:
                taken += 1
                yield event

    asking = [CompletionRequest("x")] * 8
    source: Any = SimpleNamespace(complete=counting)
    async with aclosing(requests.events_of(source, asking, BODY, deadline_s=60.0)) as events:
        await anext(events)
        await asyncio.sleep(0.1)
        assert taken < 10 + 3 * len(asking)
    assert completer.num_running == 0


async def test_prompt_logprobs_are_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of a prompt are serialized in a thread, so that the event loop goes on.

    Regression: serializing log-probabilities of 2000 tokens, each with the 20 best ones, stopped a gateway for 0.1
    s.
    """
    threads, encode = [], stream.AnswerStream._encode

    def watched(self: Any, index: int, event: TextEvent) -> bytes:
        threads.append(threading.current_thread())
        return encode(self, index, event)

    monkeypatch.setattr(stream.AnswerStream, "_encode", watched)
    body = {"prompt": "x", "echo": True, "logprobs": 1, "stream": True}
    completer = ScriptedCompleter([["a"]] * 2, origin=Provenance("m"))
    async with serving(completer) as (port, _), httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [False, True, True, True]
