"""Making of completion requests from an HTTP request's body, one per choice, and of one stream from their events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from specdec.inference.caller import caller
from specdec.inference.commit import Delta, TextEvent
from specdec.inference.errors import ContextLengthError, DeadlineError, InvalidRequestError
from specdec.inference.gateway.answers.errors import ApiError
from specdec.inference.gateway.answers.parts import ChoiceEvent
from specdec.inference.gateway.bodies.conversation import Tool
from specdec.inference.gateway.bodies.schema import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_IDS,
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from specdec.inference.gateway.dialect import Dialect
from specdec.inference.request import MAX_SEED, RequestDefaults
from specdec.inference.text.calls.grammar import arguments_of
from specdec.inference.text.chat import Chat
from specdec.inference.text.schema_fault import SEARCH_S, fault_of_schema
from specdec.inference.workers.completion import Completer, CompletionRequest, ModelCard

MAX_AT_ONCE = 32
"""Most choices of one HTTP request that run or wait in the server's queue at once; the others start later, so that
other clients' requests find space in the queue."""
MAX_UNREAD = 256
"""Most events of one HTTP request that may wait to be sent; while so many wait, its choices are not read further."""
MIN_IDS = 1024
"""Number of token ids up to which a prompt is passed on even if it exceeds the model's context, so that the target
refuses it; a longer one that exceeds the context is refused here."""
NOTHING_NEW = Delta(0, ())


def completion_requests(body: CompletionBody, card: ModelCard) -> list[CompletionRequest]:
    """Return a body's completion requests, `n` for each of its prompts, where `n` is a field of the body.

    Their order is that of the answer's choices: number p * n + i is the i-th for prompt p, counted from 0.
    """
    prompts = body.prompts()
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_ids(prompt, card, "prompt")
    max_tokens = _max_tokens(body, card.defaults, DEFAULT_MAX_TOKENS)
    template = CompletionRequest(
        "", max_new_tokens=max_tokens, logprobs=body.logprobs, echo=body.echo, adapter=card.adapter
    )
    return _repeated(body, prompts, template, card.defaults)


def max_numbers(card: ModelCard) -> int:
    """Return how many JSON numbers a request's body may have.

    They suffice for `MAX_PROMPTS` prompts that fill the model's context and are given as token ids, but are at most
    `MAX_IDS`.
    """
    return min(MAX_IDS, MAX_PROMPTS * max(MIN_IDS, card.max_length))


def check_ids(token_ids: Sequence[int], card: ModelCard, field: str) -> None:
    """Refuse a list of token ids that is longer than both the model's context and `MIN_IDS`.

    Raises:
        ContextLengthError: the list is longer; the message names the request's `field`, its length and the context's.
    """
    if len(token_ids) > max(MIN_IDS, card.max_length):
        message = f"This model's maximum context length is {card.max_length} tokens; {field} has {len(token_ids)}"
        raise ContextLengthError(message, field=field)


def chat_requests(body: ChatBody, card: ModelCard, dialect: Dialect) -> list[CompletionRequest]:
    """Return a chat's completion requests, one per choice.

    If neither the body nor the target's defaults limit the tokens, the output may fill the context. If the model may
    reason, the prompt is echoed, since its end shows whether the output begins inside the reasoning.
    """
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = _max_tokens(body, card.defaults, card.max_length)
    chat = body.chat()
    dialect.check(body)
    template = CompletionRequest("", max_new_tokens=max_tokens, logprobs=logprobs, adapter=card.adapter)
    requests = _repeated(body, [chat], template, card.defaults)
    grammar = dialect.grammar(body)
    return [replace(each, grammar=grammar, echo=dialect.thinks) for each in requests]


def _max_tokens(body: CompletionBody | ChatBody, defaults: RequestDefaults, otherwise: int) -> int:
    """Return the limit of output tokens for a request.

    This is the limit in the body. If the body has none, it is the target's default, or `otherwise` if the target has no
    default either; but at most what this client's account allows.
    """
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit is not None:
        return limit
    open_ = otherwise if defaults.max_new_tokens is None else defaults.max_new_tokens
    return min(open_, caller().limits.max_tokens or open_)


def _repeated(
    body: GenerationBody,
    prompts: Sequence[str | tuple[int, ...] | Chat],
    template: CompletionRequest,
    defaults: RequestDefaults,
) -> list[CompletionRequest]:
    """Return `body.n` requests for each prompt, made of `template` and the body's fields; each has its own seed.

    Sampling parameters that the body leaves out get the target's default, or OpenAI's if the target has none.
    """
    _check_number(len(prompts) * body.n)
    unsaid = {name: value for name, value in defaults.sampling.items() if name not in body.model_fields_set}
    one = replace(
        template,
        sampling=replace(body.sampling(), **unsaid),
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        gamma=body.gamma,
        seed_scope=body.seed_scope,
        stop=body.stops(),
        min_new_tokens=body.min_tokens,
        grammar=body.grammar_of_output(),
        cache_salt=body.cache_salt or "",
        include_rejected=body.stream_options.include_speculation,
        prediction=body.prediction.text if body.prediction else "",
        prompt_logprobs=template.logprobs if template.echo else None,
    )
    seeds = [None if body.seed in (None, -1) else (body.seed + i) & MAX_SEED for i in range(body.n)]
    return [replace(one, prompt=prompt, seed=seed) for prompt in prompts for seed in seeds]


def _check_number(num_choices: int) -> None:
    """Raise ApiError if `num_choices` is more than one HTTP request, or this client's account, may ask for."""
    limit = min(MAX_CHOICES, caller().limits.n or MAX_CHOICES)
    if num_choices > limit:
        message = f"n: {num_choices} choices are asked for, n times the number of prompts; the limit is {limit}"
        raise ApiError(400, message, param="n", code="invalid_value")


async def events_of(
    completer: Completer,
    requests: Sequence[CompletionRequest],
    body: GenerationBody,
    *,
    deadline_s: float,
    ping_s: float = 0.0,
) -> AsyncGenerator[ChoiceEvent, None]:
    """Yield the events of all choices of a body as they come; closing the iterator cancels the choices that still run.

    Args:
        requests: request for each choice; the number of an event's choice is the place of its request here.
        body: body that they were made of, by which errors name the field at fault.
        deadline_s: seconds that the choices may take.
        ping_s: seconds without an event after which an empty one is yielded; 0: none is.

    Raises:
        SpecDecError: a choice failed, or the time is over.
    """
    deadline = asyncio.get_running_loop().time() + deadline_s
    requests = [replace(request, deadline=deadline) for request in requests]  # at which the completer ends them
    try:
        if len(requests) == 1 and not ping_s:
            async with aclosing(completer.complete(requests[0])) as events:
                async for event in events:
                    yield 0, event
        else:
            async with aclosing(_merged(completer, requests, ping_s)) as items:
                async for item in items:
                    yield item
    except InvalidRequestError as exc:
        raise await _named(exc, body) from exc
    except DeadlineError:
        raise DeadlineError(f"the request is not finished after {deadline_s:g} s") from None


async def _named(error: InvalidRequestError, body: GenerationBody) -> InvalidRequestError:
    """Return an error about the field "grammar" with the name of the body's field that the grammar was made from.

    If tools have a fault in their JSON schemas, the message names the path of the first one instead. An error about
    another field is returned unchanged.
    """
    if error.field != "grammar":
        return error
    tools = body.offered() if isinstance(body, ChatBody) else []
    place, message = await asyncio.to_thread(_fault_in, tools)
    if message:
        return InvalidRequestError(f"{place}: {message}", field="tools")
    return InvalidRequestError(error.message, field=body.grammar_field() or ("tools" if tools else "grammar"))


def _fault_in(tools: Sequence[Tool]) -> tuple[str, str]:
    """Return the path and the message of the first fault in the tools' JSON schemas; empty texts if there is none."""
    deadline = time.monotonic() + SEARCH_S  # for all tools: each may be tried out in a process of its own
    for i, tool in enumerate(tools):
        if time.monotonic() > deadline:
            break
        path, message = fault_of_schema(arguments_of(tool.function.parameters))
        if message:
            return ".".join([f"tools[{i}].function.parameters", *filter(None, path.split("/"))]), message
    return "", ""


_Items = asyncio.Queue[tuple[int, TextEvent | Exception | None]]
"""Queue of pairs: the index of a choice, and its next event, the error that ended it, or None once it is complete."""


async def _merged(
    completer: Completer, requests: Sequence[CompletionRequest], ping_s: float
) -> AsyncGenerator[ChoiceEvent, None]:
    """Yield the events of all choices, each of which runs in a task of its own; the first failure ends them all.

    After `ping_s` seconds without an event, yield an empty one; if it is 0, never.
    """
    queue = _Items(MAX_UNREAD)
    room = asyncio.Semaphore(MAX_AT_ONCE)
    tasks = [
        asyncio.create_task(_pump(completer, index, request, queue, room)) for index, request in enumerate(requests)
    ]
    left = dict.fromkeys(range(len(tasks)))
    try:
        while left:
            try:
                async with asyncio.timeout(ping_s or None):
                    index, item = await queue.get()
            except TimeoutError:
                index, item = next(iter(left)), NOTHING_NEW
            if isinstance(item, Exception):
                raise item
            if item is None:
                del left[index]
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    completer: Completer, index: int, request: CompletionRequest, queue: _Items, room: asyncio.Semaphore
) -> None:
    try:
        async with room, aclosing(completer.complete(request)) as events:
            async for event in events:
                await queue.put((index, event))
    except Exception as exc:
        await queue.put((index, exc))
    else:
        await queue.put((index, None))
