"""The thin client: sends a prompt, and keeps what came back or how it failed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias

from grpc_comm.channel import open_channel, wait_until_ready
from inference.commit import Delta, Event, Started
from inference.comparison.plan.config import Contender, WorkloadConfig
from inference.comparison.run.record import RequestRecord, Round
from inference.errors import SpecDecError
from inference.request import SamplingParams
from inference.workers.completion import CompletionRequest
from inference.workers.remote import RemoteCompleter
from inference.workers.status import calls_to, code_name

CONNECT_TIMEOUT_S = 10.0

Ask: TypeAlias = Callable[[int, float], Awaitable[RequestRecord]]
"""Completes the prompt of this index; times count from the other argument, in monotonic seconds. That a request failed,
its record says."""


@asynccontextmanager
async def asking(
    address: str, prompts: Sequence[str], workload: WorkloadConfig, contender: Contender
) -> AsyncGenerator[Ask, None]:
    """A connected client of HOST:PORT.

    Raises:
        SpecDecError: nobody answers there.
    """
    async with open_channel(address) as channel:
        with calls_to(address):
            await wait_until_ready(channel, address, timeout_s=CONNECT_TIMEOUT_S)
        completer = RemoteCompleter(channel, address, deadline_s=workload.deadline_s)
        requests = [_request(prompt, workload, contender) for prompt in prompts]
        yield lambda index, sent_s: _complete(completer, requests[index], index, sent_s)


def _request(prompt: str, workload: WorkloadConfig, contender: Contender) -> CompletionRequest:
    return CompletionRequest(
        prompt=prompt,
        sampling=SamplingParams(temperature=workload.temperature),
        seed=workload.seed,
        max_new_tokens=workload.max_new_tokens,
        gamma=contender.gamma or 0,  # the target alone is what others are compared with: one token a pass
        schedule=contender.schedule,
    )


async def _complete(
    completer: RemoteCompleter, request: CompletionRequest, prompt_index: int, sent_s: float
) -> RequestRecord:
    events: list[tuple[float, Event]] = []
    try:
        async with aclosing(completer.complete(request)) as stream:
            async for event in stream:
                events.append((time.monotonic() - sent_s, event))
    except SpecDecError as exc:
        return RequestRecord(prompt_index, sent_s, 0, (), (), code_name(exc), str(exc))
    return _record(events, prompt_index, sent_s)


def _record(events: Sequence[tuple[float, Event]], prompt_index: int, sent_s: float) -> RequestRecord:
    deltas = [(arrived_s, event) for arrived_s, event in events if isinstance(event, Delta) and event.token_ids]
    started = next(event for _, event in events if isinstance(event, Started))
    return RequestRecord(
        prompt_index=prompt_index,
        sent_s=sent_s,
        num_prompt_tokens=started.num_prompt_tokens,
        token_ids=tuple(token_id for _, delta in deltas for token_id in delta.token_ids),
        rounds=tuple(_round(arrived_s, delta) for arrived_s, delta in deltas),
    )


def _round(arrived_s: float, delta: Delta) -> Round:
    counted = delta.num_draft_tokens, delta.num_accepted_tokens, delta.timings, delta.counts, delta.own
    return Round(arrived_s, len(delta.token_ids), *counted)
