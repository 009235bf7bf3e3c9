"""HTTP endpoints in a comparison: token counts that they report or lack, and failed requests."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specdec.comparison.plan.config import PromptSet, WorkloadConfig
from specdec.comparison.plan.datasets import Conversation
from specdec.comparison.plan.endpoint import Endpoint
from specdec.comparison.run.client import asking
from specdec.comparison.run.http_client import EventReader, HttpClient, _Chunk, _rounds, http_client
from specdec.comparison.run.load import closed_loop
from specdec.inference.config import DialSecurity
from specdec.inference.errors import ConfigError, UnavailableError
from tests.support.foreign import TEXT, ScriptedServer, TimedServer, foreign_server, serving

WORKLOAD = WorkloadConfig((PromptSet("kind", ("text",)),), deadline_s=1.0, ignore_eos=True)


async def test_an_answer_without_usage_counts_messages() -> None:
    """Without reported usage, a server's messages count as tokens; request fields it refused are not sent again."""
    async with foreign_server() as foreign, http_client(Endpoint("b", foreign.url), WORKLOAD) as client:
        first = await client.complete("hello", 0, None)
        second = await client.complete("hello", 1, None)
        assert len(foreign.bodies) == 3 + 1
        assert foreign.bodies[-1] == {
            "model": "theirs",
            "prompt": "hello",
            "max_tokens": 96,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
    for record in (first, second):
        assert (record.text, record.error_code, record.model_id) == ("".join(TEXT), None, "")
        assert (record.stats.num_output_tokens, record.is_estimated, record.token_ids) == (len(TEXT), True, ())
        assert record.stats.end_to_end_s >= record.stats.ttft_s > 0


async def test_a_late_answer_is_a_record_with_a_code() -> None:
    async with foreign_server() as foreign, http_client(Endpoint("b", foreign.url), WORKLOAD) as client:
        record = await client.complete("slow", 3, None)
        assert (record.error_code, record.prompt_index, record.rounds) == ("DEADLINE_EXCEEDED", 3, ())
        assert "within 1 s" in record.error_message
        assert (await client.complete("and goes on", 4, None)).error_code is None


async def test_a_refused_prompt_takes_nothing_from_the_next() -> None:
    """After a refused prompt, later requests have the same fields as before.

    Regression: one prompt that was too long made the client leave out the seed, and the request for token counts, in
    all later requests.
    """

    def answer(body: dict[str, Any]) -> tuple[int, str, str]:
        if body["prompt"] == "too long":
            return 400, "application/json", '{"error": "too long"}'
        chunk = {"choices": [{"text": "yes", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        return 200, "text/event-stream", f"data: {json.dumps(chunk)}\n\n"

    async with (
        serving(ScriptedServer(answer)) as server,
        http_client(Endpoint("b", server.url), WORKLOAD) as client,
    ):
        assert (await client.complete("too long", 0, None)).error_code == "400"
        record = await client.complete("short", 1, None)
    assert (record.is_estimated, record.stats.num_output_tokens) == (False, 1)
    assert "seed" in server.bodies[-1]
    assert server.bodies[-1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


MANY, ENDLESS = '{"completion_tokens": "many"}', '{"completion_tokens": 1e999}'


def stream_of(usage: str) -> str:
    return f'retry: 3\n\ndata: {{"choices": [], "usage": {usage}}}\n\n'


@pytest.mark.parametrize(
    ("kind", "text", "code", "words"),
    [
        *(
            ("text/event-stream", stream_of(usage), "BAD_CHUNK", usage)
            for usage in (MANY, ENDLESS, '{"prompt_tokens": [1]}', "[1]", '"none"')
        ),
        ("text/html", "<p>data: no</p>", "NO_STREAM", "text/html"),
    ],
)
async def test_an_answer_that_is_no_stream_is_a_record_with_a_code(kind: str, text: str, code: str, words: str) -> None:
    """An answer that is no stream of events becomes a record with an error code; an event without data is ignored.

    The server answers with content type `kind` and `text`; the record has `code`, and `words` in its message.

    Regression: a count that is no number ended the comparison with a traceback.
    """
    server = ScriptedServer(lambda _: (200, kind, text))
    async with serving(server), http_client(Endpoint("b", server.url), WORKLOAD) as client:
        record = await client.complete("hello", 0, None)
    assert (record.error_code, words in record.error_message) == (code, True)


async def test_a_lost_server_is_a_record_or_error() -> None:
    endpoint = Endpoint("b", "http://127.0.0.1:9/v1")
    async with aiohttp.ClientSession(f"{endpoint.url}/") as http:
        gone = HttpClient(http, endpoint, WORKLOAD)
        assert (await gone.complete("hello", 0, None)).error_code == "UNREACHABLE"
    with pytest.raises(
        UnavailableError, match=r"endpoint b does not name its model at http://127\.0\.0\.1:9/v1/models"
    ):
        async with http_client(Endpoint("b", "http://127.0.0.1:9/v1"), WORKLOAD):
            pass


async def test_a_conversation_sends_what_was_answered_before() -> None:
    async with foreign_server() as foreign, http_client(Endpoint("b", foreign.url), WORKLOAD) as client:
        prompts = (Conversation(("one", "two"), system="be brief"), "plain", Conversation(("it dies", "never asked")))
        records = await closed_loop(asking(client, prompts), len(prompts), 2)
        said = [body["messages"] for body in foreign.bodies if "messages" in body]
    # Each prompt more than once, as two clients at once ask; its turns keep their numbers.
    assert {record.prompt_index for record in records} == {0, 1, 2, 3}
    assert [record.error_code for record in records if record.prompt_index == 3] == ["DISCONNECTED"]
    assert [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "".join(TEXT)},
        {"role": "user", "content": "two"},
    ] in said


@pytest.mark.parametrize(
    ("texts", "counts", "total", "expected"),
    [
        ("a bb ccc", (1, 4, 5), 5, {0: 1, 1: 3, 2: 1}),
        ("a bb ccc", (2, 2, 5), 5, {0: 2, 2: 3}),  # a chunk without a token has no time of its own
        ("a bb ccc", None, 3, {0: 1, 1: 1, 2: 1}),
        ("a bb ccc", None, 12, {0: 2, 1: 4, 2: 6}),
        ("a bb ccc", None, None, {0: 1, 1: 1, 2: 1}),
        # A text shorter than a token was left out of TTFT, since it got no token of the total.
        ("1 andalongtime after .", None, 5, {0: 0, 1: 3, 2: 2, 3: 0}),
    ],
)
def test_token_counts_are_reported_or_spread(
    texts: str, counts: tuple[int, ...] | None, total: int | None, expected: dict[int, int]
) -> None:
    """Tokens have the time of the message that brought them.

    If a server reports no counts per message, the total is divided among the messages by their length of text.

    Args:
        texts: texts of the messages, with spaces between; they come at seconds 0, 1, 2, ...
        counts: by message, the number of tokens so far that it reports; None if they report none.
        total: number of tokens that a last message, without text, reports.
        expected: number of tokens by second.
    """
    words = texts.split()
    known = zip(words, counts or [None] * len(words), strict=True)
    chunks = [_Chunk(float(at), word, count) for at, (word, count) in enumerate(known)]
    chunks.append(_Chunk(9.0, "", total))  # usage, in a message that ends the answer
    assert {item.arrived_s: item.num_tokens for item in _rounds(chunks, total)} == expected


@pytest.mark.parametrize(
    ("scheme", "security", "word"),
    [
        ("https", DialSecurity(ca=Path("no.pem")), "certificates"),
        ("http", DialSecurity(token_file=Path("no.token")), "token"),
    ],
)
async def test_files_that_cannot_be_used_are_named(scheme: str, security: DialSecurity, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        async with http_client(Endpoint("b", f"{scheme}://127.0.0.1:9/v1", security), WORKLOAD):
            pass


STREAM = """\
: a comment
retry: 3

event: message
id: 7
data: {"text":
data:"h\u00e9"}

data:

data
data: second

dataset: ignored

data: unfinished"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_events_do_not_depend_on_the_parts_of_a_stream(line_end: str) -> None:
    """The events read from a stream are the same however its bytes are split into packets.

    A packet may end within a character, or between carriage return and line feed.
    """
    stream = STREAM.replace("\n", line_end).encode()
    for at in range(len(stream) + 1):
        events = EventReader()
        found = events.feed(stream[:at]) + events.feed(stream[at:])
        assert found == ['{"text":\n"h\u00e9"}', "\nsecond"]


async def test_thirty_two_streams_at_once_are_whole() -> None:
    """Thirty-two streams at once are read whole: text, counts of tokens, and one record per request.

    Times at the client and at the server are printed (`pytest -s`), not compared: a busy machine changes them.
    """
    num_streams, server = 32, TimedServer(num_tokens=20)
    prompts = tuple(f"prompt {number}" for number in range(num_streams))
    workload = WorkloadConfig((PromptSet("kind", prompts),), deadline_s=60.0)
    async with serving(server), http_client(Endpoint("b", server.url), workload) as client:
        records = await closed_loop(asking(client, prompts), num_streams, num_streams)
    assert [record.error_message for record in records if record.error_code] == []
    assert sorted(record.prompt_index for record in records) == sorted([*range(num_streams)] * 2)
    assert server.num_connections < len(records)  # a connection is kept, so TTFT is not that of a handshake
    for record in records:
        assert record.text == server.text(prompts[record.prompt_index])
        assert (record.stats.num_output_tokens, record.num_prompt_tokens, record.is_estimated) == (20, 1, False)
        assert [item.num_tokens for item in record.rounds] == [1] * 20
    for name, known_ms in (("ttft_s", 5), ("end_to_end_s", 195)):
        found_s = statistics.median(getattr(record.stats, name) for record in records)
        print(f"{name}: {found_s * 1e3:.1f} ms at the client, {known_ms} at the server")


async def test_times_count_from_when_a_request_leaves() -> None:
    """Times count from the moment when a request is really sent, which a busy event loop delays.

    The server, which has a thread of its own, answers with the time at which it has read the request.

    Regression: the clocks of 32 streams started before their requests were sent.
    """

    def answer(_: dict[str, Any]) -> tuple[int, str, str]:
        chunk = {"choices": [{"text": f"{time.monotonic()}", "finish_reason": "stop"}]}
        return 200, "text/event-stream", f"data: {json.dumps(chunk)}\n\n"

    async def serve() -> None:
        async with serving(server):
            ready.set()
            await asyncio.Event().wait()

    server, ready = ScriptedServer(answer), threading.Event()
    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    assert ready.wait(10)
    async with http_client(Endpoint("b", server.url), WORKLOAD) as client:
        began_s = time.monotonic()
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)
        now = await asyncio.gather(*(client.complete("hello", number, None) for number in range(2)))
        due = await client.complete("hello", 2, began_s)
    assert [record.error_message for record in (*now, due)] == ["", "", ""]
    lates_s = [float(record.text) - record.sent_s for record in (*now, due)]
    assert min(lates_s) >= 0
    assert max(lates_s[:2]) < 0.2 < 0.3 <= lates_s[2]
