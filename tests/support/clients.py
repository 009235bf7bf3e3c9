"""Clients that the suites in tests/suites use: they ask over gRPC or HTTP, and compare answers with expected ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from specdec.grpc_comm.channel import open_channel
from specdec.inference.commit import Delta, Finished
from specdec.inference.errors import CapacityError, SpecDecError
from specdec.inference.request import SamplingParams
from specdec.inference.workers.calls.status import code_name
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest

TEMPERATURE = 0.8
SILENT = "ended without a word"
FULL = ("RESOURCE_EXHAUSTED", "HTTP 429")
PROMPTS = ("It was the best of times", "The wind", "Once upon a time there was", "def main():", "Dear Sir,", "I")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, a seed and a number of tokens, which together determine the answer's tokens."""

    prompt: str
    seed: int
    num_tokens: int


@dataclass
class Answer:
    """The part of an answer that has arrived, and how the answer ended.

    Attributes:
        token_ids: token ids of an answer over gRPC; empty over HTTP.
        fault: name of the error status, such as HTTP 429, that ended the answer; None if it is complete.
        words: the error's message.
        num_accepted_tokens: draft tokens that the target accepted, over gRPC; 0 over HTTP.
        arrivals: times (`time.monotonic`) at which messages with tokens arrived.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    fault: str | None = SILENT
    words: str = ""
    arrivals: list[float] = field(default_factory=list)
    num_accepted_tokens: int = 0

    def same_as(self, expected: Answer) -> bool:
        return self.fault is None and self.text == expected.text and self.token_ids in (expected.token_ids, [])

    def begins(self, expected: Answer) -> bool:
        """Return whether what has arrived, in text and token ids, is the beginning of the expected answer."""
        whole, num_tokens = expected.token_ids, len(self.token_ids)
        return expected.text.startswith(self.text.rstrip("\ufffd")) and whole[:num_tokens] == self.token_ids

    @property
    def longest_gap_s(self) -> float:
        return max((later - earlier for earlier, later in itertools.pairwise(self.arrivals)), default=0.0)


Progress = Callable[[int], None]
"""Callback after each message, with the number of tokens so far (gRPC) or of messages so far (HTTP)."""


Ask = Callable[..., Awaitable[Answer]]
"""Function that sends a `Question`, and returns its `Answer`; it may take a `Progress` callback and a deadline."""


async def ask(address: str, question: Question, told: Progress | None = None, *, gamma: int | None = None) -> Answer:
    """Send a question over gRPC, on a new connection; return its answer, and meanwhile report progress to `told`."""
    async with open_channel(address) as channel:
        return await ask_on(channel, question, told, gamma=gamma)


async def ask_on(
    channel: grpc.aio.Channel,
    question: Question,
    told: Progress | None = None,
    *,
    gamma: int | None = None,
    deadline_s: float = 120.0,
) -> Answer:
    """Send a question over gRPC, on an open channel; return its answer.

    Call `told` with the number of tokens so far after each message. `gamma` is the most draft tokens per pass; None
    leaves it to the server. No error of the request is raised: its name is the answer's `fault`. If the server was
    full, the function returns only after the time that the server asked to wait, at most a second.
    """
    request = CompletionRequest(
        question.prompt,
        sampling=SamplingParams(temperature=TEMPERATURE),
        seed=question.seed,
        max_new_tokens=question.num_tokens,
        ignore_eos=True,
        gamma=gamma,
    )
    answer = Answer()
    try:
        async with aclosing(RemoteCompleter(channel, "server", deadline_s=deadline_s).complete(request)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    answer.fault = None
                elif isinstance(event, Delta):
                    answer.token_ids += event.token_ids
                    answer.text += event.text
                    answer.num_accepted_tokens += event.num_accepted_tokens
                    answer.arrivals.append(time.monotonic())
                    if told is not None:
                        told(len(answer.token_ids))
    except SpecDecError as exc:
        answer.fault, answer.words = code_name(exc), str(exc)
        if isinstance(exc, CapacityError):
            await asyncio.sleep(min(exc.retry_after_s, 1.0))
    return answer


async def ask_http(
    client: httpx.AsyncClient, question: Question, told: Progress | None = None, *, deadline_s: float = 120.0
) -> Answer:
    """Send a question over HTTP; return its answer. The base URL of `client` must be the server's.

    Call `told` with the number of messages so far after each one. No error is raised: it stands in the answer's
    `fault`.
    """
    body = {
        "prompt": question.prompt,
        "max_tokens": question.num_tokens,
        "temperature": TEMPERATURE,
        "seed": question.seed,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"X-Deadline-S": str(deadline_s)}
    answer = Answer()
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code == 200:
                await _read_events(response, answer, told)
            else:
                await response.aread()
                answer.fault, answer.words = f"HTTP {response.status_code}", response.text
    except httpx.HTTPError as exc:
        answer.fault = "TIMEOUT" if isinstance(exc, httpx.TimeoutException) else "DISCONNECTED"
    return answer


async def _read_events(response: httpx.Response, answer: Answer, told: Progress | None) -> None:
    finished = False
    async for document in _documents(response):
        if "error" in document:
            answer.fault = str(document["error"].get("code") or document["error"].get("type")).upper()
            answer.words = str(document["error"].get("message"))
            return
        for choice in document["choices"]:
            answer.text += choice["text"]
            finished |= choice["finish_reason"] is not None
        answer.arrivals.append(time.monotonic())
        if told is not None:
            told(len(answer.arrivals))
    if finished:
        answer.fault = None


async def _documents(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON of each server-sent event of a response, leaving out the final [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@dataclass
class Load:
    """Several clients that send one HTTP request after another without a pause, and counts of how these ended.

    A client that loses its connection goes on with its next question.

    Attributes:
        expected: the questions, each with the answer of an undisturbed server.
        num_same: number of complete answers that are as expected.
        refused: error messages of requests that the server refused or ended with an error.
        num_cut: number of answers that ended too early because the connection was lost.
        other: answers that are neither the expected one nor a beginning of it.
        longest_gap_s: most seconds between two events of an answer, or between its request and the first event.
    """

    expected: dict[Question, Answer]
    num_same: int = 0
    refused: list[str] = field(default_factory=list)
    num_cut: int = 0
    other: list[Answer] = field(default_factory=list)
    longest_gap_s: float = 0.0

    async def during(self, client: httpx.AsyncClient, num_clients: int, work: Coroutine[Any, Any, None]) -> None:
        """Let `num_clients` clients send requests until `work` is done, then wait for their last answers."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_clients):
                tasks.create_task(self._ask(client, number, over))
            try:
                await work
            finally:
                over.set()

    async def _ask(self, client: httpx.AsyncClient, number: int, over: asyncio.Event) -> None:
        asked = list(self.expected)
        while not over.is_set():
            number = (number + 1) % len(asked)
            began = time.monotonic()
            answer = await ask_http(client, asked[number])
            self._count(answer, self.expected[asked[number]], began)

    def _count(self, answer: Answer, expected: Answer, began: float) -> None:
        gaps = [later - earlier for earlier, later in itertools.pairwise([began, *answer.arrivals])]
        self.longest_gap_s = max(self.longest_gap_s, *gaps, 0.0)
        if answer.same_as(expected):
            self.num_same += 1
        elif answer.fault is None or not answer.begins(expected):
            self.other.append(answer)
        elif answer.fault == "DISCONNECTED":
            self.num_cut += 1
        else:
            self.refused.append(f"{answer.fault}: {answer.words}")


def questions(num_questions: int, num_tokens: Sequence[int]) -> list[Question]:
    """Return questions with the seeds 0, 1, 2 and so on, which ask in turn for these numbers of tokens."""
    seeds = range(num_questions)
    return [Question(PROMPTS[seed % len(PROMPTS)], seed, num_tokens[seed % len(num_tokens)]) for seed in seeds]


async def expected_answers(address: str, asked: Sequence[Question]) -> dict[Question, Answer]:
    """Ask a target one question after the other, without draft tokens; return the answers by question.

    Raises:
        RuntimeError: an answer ends with an error.
    """
    answers = [await ask(address, question, gamma=0) for question in asked]
    if any(answer.fault is not None for answer in answers):
        raise RuntimeError(f"an undisturbed target failed: {[answer.fault for answer in answers]}")
    return dict(zip(asked, answers, strict=True))


async def touch(address: str, prompt_length: int, num_slots: int) -> None:
    """Send `num_slots` requests at once, so that each slot (sequence) of the server's KV cache is written.

    So all of its memory is in use. Each prompt has `prompt_length` tokens.

    Raises:
        SpecDecError: a request failed.
    """

    async def one(seed: int) -> None:
        prompt = tuple(5 + (seed + position) % 1000 for position in range(prompt_length))
        request = CompletionRequest(prompt, seed=seed, max_new_tokens=8, ignore_eos=True)
        async with open_channel(address) as channel:
            async for _ in RemoteCompleter(channel, address, deadline_s=120.0).complete(request):
                pass

    await asyncio.gather(*(one(seed) for seed in range(num_slots)))
