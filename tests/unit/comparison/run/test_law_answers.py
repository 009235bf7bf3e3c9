"""`specdec law` tests a server's samples; it says what is wrong with a server whose answers it cannot test."""

from __future__ import annotations

import asyncio
import json

import pytest

from specdec.comparison.run.law import Asked, answers_of
from specdec.inference.errors import ConfigError, UnavailableError

CHOICE = {"text": " a b", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "top_logprobs": [{}, {}]}}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<html>", "does not answer with JSON"),
        (json.dumps({"choices": [{"text": "a", "logprobs": None}]}), "no token with the log-probabilities of 5 others"),
        (json.dumps({"choices": [CHOICE]}), "no token with the log-probabilities of 5 others"),
    ],
    ids=["no JSON", "no log-probabilities", "too few of them"],
)
async def test_an_answer_that_cannot_be_tested_is_named(body: str, fault: str) -> None:
    """An answer without the probabilities that the test needs ends the test with an error that names the fault.

    Regression: such answers ended in a traceback, after a line that said that the texts follow the distribution.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with asyncio.timeout(60), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match=fault):
            await answers_of(f"http://127.0.0.1:{port}/v1", "a model", 2, 1)


@pytest.mark.parametrize(
    ("flag", "value"), [("alpha", 0.6), ("shift", 0.0), ("concurrency", 0), ("num_requests", 0), ("num_requests", -3)]
)
def test_a_number_out_of_its_range_is_named_before_anything_is_asked(flag: str, value: float) -> None:
    right = {"url": "", "model": None, "num_requests": None, "alpha": 0.01, "shift": 0.02, "concurrency": 8}
    with pytest.raises(ConfigError, match=rf"--{flag} {value} must be in"):
        Asked(**{**right, flag: value})  # type: ignore[arg-type]
