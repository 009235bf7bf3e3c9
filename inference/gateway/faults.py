"""Faults that the server behind finds in a grammar, in the words of the client who sent it: which field, and where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from inference.errors import InvalidRequestError
from inference.gateway.dialect import function_of
from inference.gateway.requests import ChoiceEvent
from inference.gateway.schema import ChatBody, GenerationBody
from inference.text.grammar_source import fault_of_schema


async def with_fields_named(
    events: AsyncGenerator[ChoiceEvent, None], body: GenerationBody
) -> AsyncGenerator[ChoiceEvent, None]:
    """The events of a request; only one that fails pays for this."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except InvalidRequestError as exc:
        if exc.field != "grammar":
            raise
        raise await asyncio.to_thread(_named, exc, body) from exc


def _named(error: InvalidRequestError, body: GenerationBody) -> InvalidRequestError:
    tools = body.offered() if isinstance(body, ChatBody) else []
    for i, tool in enumerate(tools):
        path, fault = fault_of_schema(function_of(tool).arguments())
        if fault:
            place = ".".join([f"tools[{i}].function.parameters", *filter(None, path.split("/"))])
            return InvalidRequestError(f"{place}: {fault}", field="tools")
    return InvalidRequestError(error.message, field=body.grammar_field() or ("tools" if tools else "grammar"))
