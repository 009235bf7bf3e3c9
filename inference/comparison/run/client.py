"""Thin clients: they send a prompt, or a conversation turn by turn, and keep what came back or how it failed."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from grpc_comm.channel import open_channel, wait_until_ready
from inference.commit import Delta, Event, Started
from inference.comparison.plan.config import ComparisonConfig, Contender, WorkloadConfig
from inference.comparison.plan.datasets import Conversation, Prompt
from inference.comparison.plan.endpoint import Endpoint
from inference.comparison.run.record import RequestRecord, Round
from inference.config import PLAIN, DialSecurity
from inference.errors import SpecDecError
from inference.request import LEFT_TO_SERVER, SamplingParams
from inference.text.chat import Chat, ChatMessage
from inference.workers.completion import CompletionRequest
from inference.workers.dialling import credentials_of
from inference.workers.remote import RemoteCompleter
from inference.workers.status import calls_to, code_name

CONNECT_TIMEOUT_S = 10.0

Clients: TypeAlias = "dict[Contender, Client]"
Ask: TypeAlias = Callable[[int, float], Awaitable[list[RequestRecord]]]
"""Completes the prompt of this index, all its turns; times count from the other argument, in monotonic seconds. That a
request failed, its record says."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of its model.

    Attributes:
        max_length: tokens that prompt and answer may have together; None: it does not say.
        model_id: hash of what its tokens depend on; empty: it does not say.
    """

    max_length: int | None
    model_id: str


class Client(Protocol):
    """Asks one server."""

    async def model(self) -> Served:
        """What it serves; afterwards there is a connection.

        Raises:
            SpecDecError: it cannot be reached, or does not answer as it should.
        """

    async def count(self, prompt: str | Chat) -> int | None:
        """Tokens of a prompt as the server reads it; None: it does not tell."""

    async def complete(self, prompt: str | Chat, prompt_index: int, sent_s: float) -> RequestRecord:
        """Ask, and time the answer, from `sent_s` on. That it failed, the record says."""


class GrpcClient:
    """Of one of our servers; see `Client`."""

    def __init__(self, completer: RemoteCompleter, workload: WorkloadConfig, contender: Contender) -> None:
        self._completer = completer
        self._workload = workload
        self._contender = contender

    async def model(self) -> Served:
        """See `Client`."""
        card = await self._completer.model(timeout_s=CONNECT_TIMEOUT_S)
        return Served(card.max_length, card.model_id)

    async def count(self, prompt: str | Chat) -> int | None:
        """See `Client`."""
        return len(await self._completer.encode(prompt))

    async def complete(self, prompt: str | Chat, prompt_index: int, sent_s: float) -> RequestRecord:
        """See `Client`."""
        events: list[tuple[float, Event]] = []
        try:
            async with aclosing(self._completer.complete(_request(prompt, self._workload, self._contender))) as stream:
                async for event in stream:
                    events.append((time.monotonic() - sent_s, event))
        except SpecDecError as exc:
            return RequestRecord(prompt_index, sent_s, 0, (), (), code_name(exc), str(exc))
        return _record(events, prompt_index, sent_s)


def _request(prompt: str | Chat, workload: WorkloadConfig, contender: Contender) -> CompletionRequest:
    return CompletionRequest(
        prompt=prompt,
        sampling=SamplingParams(temperature=workload.temperature),
        unsaid=frozenset(LEFT_TO_SERVER) - {"temperature"},
        seed=workload.seed,
        max_new_tokens=workload.max_new_tokens,
        ignore_eos=workload.ignore_eos,
        # The target alone is what others are compared with: one token a pass. An endpoint drafts as it likes.
        gamma=None if contender.endpoint is not None else contender.gamma or 0,
        schedule=contender.schedule,
    )


def _record(events: Sequence[tuple[float, Event]], prompt_index: int, sent_s: float) -> RequestRecord:
    deltas = [(arrived_s, event) for arrived_s, event in events if isinstance(event, Delta)]
    started = next(event for _, event in events if isinstance(event, Started))
    return RequestRecord(
        prompt_index=prompt_index,
        sent_s=sent_s,
        num_prompt_tokens=started.num_prompt_tokens,
        token_ids=tuple(token_id for _, delta in deltas for token_id in delta.token_ids),
        rounds=tuple(_round(arrived_s, delta) for arrived_s, delta in deltas if delta.token_ids),
        text="".join(delta.text for _, delta in deltas),
        model_id=started.provenance.model_id,
    )


def _round(arrived_s: float, delta: Delta) -> Round:
    counted = delta.num_draft_tokens, delta.num_accepted_tokens, delta.timings, delta.counts, delta.own
    return Round(arrived_s, len(delta.token_ids), *counted)


@asynccontextmanager
async def connected(config: ComparisonConfig, address: Callable[[Contender], str]) -> AsyncGenerator[Clients, None]:
    """A client for everything that is compared, until the block is left.

    Args:
        address: of a server that the comparison has started.

    Raises:
        ConfigError: a file of certificates, or with a token, cannot be used.
        UnavailableError: a server cannot be reached.
    """
    endpoints = {endpoint.name: endpoint for endpoint in config.endpoints}
    async with AsyncExitStack() as stack:
        clients: Clients = {}
        for contender in config.contenders:
            endpoint = endpoints.get(contender.endpoint or "")
            clients[contender] = await _connect(stack, endpoint, address, config.workload, contender)
        yield clients


async def _connect(
    stack: AsyncExitStack,
    endpoint: Endpoint | None,
    address: Callable[[Contender], str],
    workload: WorkloadConfig,
    contender: Contender,
) -> Client:
    if endpoint is None:
        return await _dial(stack, address(contender), PLAIN, workload, contender)
    if endpoint.is_grpc:
        return await _dial(stack, endpoint.address, endpoint.security, workload, contender)
    from inference.comparison.run.http_client import http_client  # of an extra

    return await stack.enter_async_context(http_client(endpoint, workload))


async def _dial(
    stack: AsyncExitStack, address: str, security: DialSecurity, workload: WorkloadConfig, contender: Contender
) -> Client:
    credentials = credentials_of(security)
    channel = await stack.enter_async_context(open_channel(address, credentials))
    with calls_to(address):
        tls = None if credentials is None else credentials.tls
        await wait_until_ready(channel, address, timeout_s=CONNECT_TIMEOUT_S, tls=tls)
    return GrpcClient(RemoteCompleter(channel, address, deadline_s=workload.deadline_s), workload, contender)


def asking(client: Client, prompts: Sequence[Prompt]) -> Ask:
    """Asks a client for one of these prompts."""
    turns = [len(prompt.turns) if isinstance(prompt, Conversation) else 1 for prompt in prompts]
    firsts = [0, *itertools.accumulate(turns)]
    return lambda index, sent_s: _converse(client, prompts[index], firsts[index], sent_s)


async def _converse(client: Client, prompt: Prompt, first: int, sent_s: float) -> list[RequestRecord]:
    """Ask what a prompt is made of; `first` is the number of its first request."""
    if isinstance(prompt, str):
        return [await client.complete(prompt, first, sent_s)]
    records: list[RequestRecord] = []
    said = [ChatMessage("system", prompt.system)] if prompt.system else []
    for number, turn in enumerate(prompt.turns, start=first):
        said.append(ChatMessage("user", turn))
        began_s = time.monotonic() if records else sent_s
        records.append(await client.complete(Chat(tuple(said)), number, began_s))
        if records[-1].error_code is not None:
            break  # what follows would be another conversation
        said.append(ChatMessage("assistant", records[-1].text))
    return records
