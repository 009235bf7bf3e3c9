"""Thin client of a server of this project."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from comparison.plan.config import Contender, WorkloadConfig
from comparison.run.client import CONNECT_TIMEOUT_S, NUM_BEST, Step
from comparison.run.record import RequestRecord, Round
from grpc_comm.channel import open_channel, wait_until_ready
from inference.commit import Delta, Event, Started
from inference.config import DialSecurity
from inference.errors import SpecDecError
from inference.request import LEFT_TO_SERVER, SamplingParams
from inference.text.chat import Chat
from inference.workers.completion import CompletionRequest
from inference.workers.dialling import credentials_of
from inference.workers.remote import RemoteCompleter
from inference.workers.status import calls_to, code_name


class GrpcClient:
    """Client of a server of this project; see `Client`."""

    def __init__(self, completer: RemoteCompleter, workload: WorkloadConfig, contender: Contender) -> None:
        self._completer = completer
        self._workload = workload
        self._contender = contender

    async def context(self) -> int | None:
        """See `Client`."""
        return (await self._completer.model(timeout_s=CONNECT_TIMEOUT_S)).max_length

    async def count(self, prompt: str | Chat) -> int | None:
        """See `Client`."""
        return len(await self._completer.encode(prompt))

    async def complete(self, prompt: str | Chat, prompt_index: int, sent_s: float) -> RequestRecord:
        """See `Client`."""
        events: list[tuple[float, Event]] = []
        try:
            async with aclosing(
                self._completer.complete(request_of(prompt, self._workload, self._contender))
            ) as stream:
                async for event in stream:
                    events.append((time.monotonic() - sent_s, event))
        except SpecDecError as exc:
            return RequestRecord(
                prompt_index, sent_s, 0, (), (), code_name(exc), str(exc), failed_s=time.monotonic() - sent_s
            )
        return record_of(events, prompt_index, sent_s)

    async def scored(self, prompt: str) -> tuple[str, list[Step]]:
        """See `Client`."""
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
    """Return the request for a prompt, with this contender's gamma and schedule."""
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


def record_of(events: Sequence[tuple[float, Event]], prompt_index: int, sent_s: float) -> RequestRecord:
    """Return the record of one answer from its events, each with its seconds since the request was sent."""
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
        num_cached_tokens=started.num_cached_tokens,
    )


def _round(arrived_s: float, delta: Delta) -> Round:
    counted = delta.num_draft_tokens, delta.num_accepted_tokens, delta.timings, delta.counts, delta.own
    return Round(arrived_s, len(delta.token_ids), *counted)


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
        yield GrpcClient(RemoteCompleter(channel, address, deadline_s=workload.deadline_s), workload, contender)
