"""Thin client of a server of this project."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import grpc
from google.protobuf.message import DecodeError

from specdec.comparison.plan.config import Contender, WorkloadConfig
from specdec.comparison.plan.record import RequestRecord, Round
from specdec.comparison.run.client import CONNECT_TIMEOUT_S, NUM_BEST, Step
from specdec.grpc_comm.channel import open_channel, wait_until_ready
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.commit import Delta, Started, TextEvent
from specdec.inference.config import DialSecurity
from specdec.inference.errors import SpecDecError, UnavailableError
from specdec.inference.request import LEFT_TO_SERVER, SamplingParams
from specdec.inference.text.chat import Chat
from specdec.inference.workers.calls.convert import completion_to_message, event_from_message
from specdec.inference.workers.calls.dialling import credentials_of
from specdec.inference.workers.calls.status import calls_to, code_name
from specdec.inference.workers.completing.output import Output
from specdec.inference.workers.completing.remote import MAX_DEADLINE_S, RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest

GENERATE = "/specdec.v1.GenerationService/Generate"


@dataclass(slots=True)
class _Departure:
    """Request that records the time at which gRPC serializes it, which is some event-loop steps after the call's start.

    Attributes:
        left_s: this time, in monotonic seconds; before that, the time given.
    """

    message: pb.GenerateRequest
    left_s: float = 0.0

    def take(self) -> bytes:
        data: bytes = self.message.SerializeToString()
        self.left_s = time.monotonic()
        return data


class GrpcClient:
    """Client of a server of this project; see `Client`. It parses an answer's messages once all have arrived."""

    def __init__(self, channel: grpc.aio.Channel, address: str, workload: WorkloadConfig, contender: Contender) -> None:
        self._completer = RemoteCompleter(channel, address, deadline_s=workload.deadline_s)
        generate: Callable[..., AsyncIterable[bytes]] = channel.unary_stream(GENERATE, _Departure.take)
        self._generate = generate
        self._address = address
        self._workload = workload
        self._contender = contender

    async def context(self) -> int | None:
        """Connect; return the model's limit of prompt and answer together, in tokens."""
        return (await self._completer.model(timeout_s=CONNECT_TIMEOUT_S)).max_length

    async def count(self, prompt: str | Chat) -> int | None:
        """Return how many tokens a prompt has, as the server's tokenizer counts."""
        return len(await self._completer.encode(prompt))

    async def complete(self, prompt: str | Chat, prompt_index: int, due_s: float | None) -> RequestRecord:
        """Send one prompt, and return the record of its answer; a failure is recorded, not raised.

        Args:
            prompt_index: number of the prompt in its set, for the record.
            due_s: monotonic seconds that count as the request's start; None: the moment when it leaves.
        """
        began_s = time.monotonic() if due_s is None else due_s
        arrived = list[tuple[float, bytes]]()
        try:
            request = _Departure(completion_to_message(request_of(prompt, self._workload, self._contender)), began_s)
            with calls_to(self._address):
                async for data in self._generate(request, timeout=min(self._workload.deadline_s, MAX_DEADLINE_S)):
                    arrived.append((time.monotonic(), data))
            events = self._events(arrived)
        except SpecDecError as exc:
            failed_s = time.monotonic() - began_s
            return RequestRecord(prompt_index, began_s, 0, (), (), code_name(exc), str(exc), failed_s=failed_s)
        sent_s = request.left_s if due_s is None else due_s
        return record_of([(at_s - sent_s, event) for at_s, event in events], prompt_index, sent_s)

    def _events(self, arrived: Sequence[tuple[float, bytes]]) -> list[tuple[float, TextEvent]]:
        """Return the events of a whole answer, each with its time of arrival.

        Args:
            arrived: for each message of the answer its time of arrival, in monotonic seconds, and its bytes.

        Raises:
            UnavailableError: events are unreadable, missing or too many.
        """
        try:
            events = [(at_s, event_from_message(pb.GenerateResponse.FromString(data))) for at_s, data in arrived]
        except DecodeError as exc:
            raise UnavailableError(f"a message of the answer cannot be read: {exc}", address=self._address) from exc
        answer = Output(self._address, limit=self._workload.max_new_tokens)
        for _, event in events:
            answer.check(event)
        answer.check_end()
        return events

    async def scored(self, prompt: str) -> tuple[str, list[Step]]:
        """Return the text of the answer to a prompt, and a step for each token; both are empty after a failure."""
        request = replace(request_of(prompt, self._workload, self._contender), logprobs=NUM_BEST)
        text, steps, offset = "", [], 0
        try:
            async with aclosing(self._completer.complete(request)) as stream:
                async for delta in stream:
                    if isinstance(delta, Delta):
                        text += delta.text
                        for scores in delta.logprobs:
                            best = ((each.text.decode(errors="replace"), each.logprob) for each in scores)
                            steps.append(Step(offset, tuple(best)))
                            offset += scores.num_characters
        except SpecDecError:
            return "", []
        return text, steps


def request_of(prompt: str | Chat, workload: WorkloadConfig, contender: Contender) -> CompletionRequest:
    """Return the request for a prompt, with the workload's sampling and limits.

    The contender, a way to serve, decides on the number of draft tokens and the schedule; an endpoint decides itself.
    """
    return CompletionRequest(
        prompt=prompt,
        sampling=SamplingParams(temperature=workload.temperature),
        unsaid=frozenset(LEFT_TO_SERVER) - {"temperature"},
        seed=workload.seed,
        max_new_tokens=workload.max_new_tokens,
        ignore_eos=workload.ignore_eos,
        grammar=workload.grammar,
        # The target alone, the baseline, computes one token a pass. An endpoint chooses its drafting itself.
        gamma=None if contender.endpoint is not None else contender.gamma or 0,
        schedule=contender.schedule,
    )


def record_of(events: Sequence[tuple[float, TextEvent]], prompt_index: int, sent_s: float) -> RequestRecord:
    """Return the record of one answer from its events, each given with its seconds since the request was sent.

    An answer without the event that begins all answers is recorded as failed.
    """
    deltas = [(arrived_s, event) for arrived_s, event in events if isinstance(event, Delta)]
    if (started := next((event for _, event in events if isinstance(event, Started)), None)) is None:
        return RequestRecord(prompt_index, sent_s, 0, (), (), "INTERNAL", "the answer does not say how it began")
    return RequestRecord(
        prompt_index=prompt_index,
        sent_s=sent_s,
        num_prompt_tokens=started.num_prompt_tokens,
        token_ids=tuple(token_id for _, delta in deltas for token_id in delta.token_ids),
        rounds=tuple(_round(arrived_s, delta) for arrived_s, delta in deltas if delta.token_ids),
        text="".join(delta.text for _, delta in deltas),
        model_id=started.provenance.model_id,
        num_cached_tokens=started.num_cached_tokens,
    )


def _round(arrived_s: float, delta: Delta) -> Round:
    counted = delta.num_draft_tokens, delta.num_accepted_tokens, delta.timings, delta.counts, delta.own
    return Round(arrived_s, len(delta.token_ids), *counted, is_held=delta.is_held)


@asynccontextmanager
async def grpc_client(
    address: str, security: DialSecurity, workload: WorkloadConfig, contender: Contender
) -> AsyncGenerator[GrpcClient, None]:
    """Yield a client that is connected to HOST:PORT.

    Raises:
        ConfigError: a file with certificates or the token cannot be used.
        UnavailableError: the server cannot be reached.
    """
    credentials = credentials_of(security)
    async with open_channel(address, credentials) as channel:
        with calls_to(address):
            tls = None if credentials is None else credentials.tls
            await wait_until_ready(channel, address, timeout_s=CONNECT_TIMEOUT_S, tls=tls)
        yield GrpcClient(channel, address, workload, contender)
