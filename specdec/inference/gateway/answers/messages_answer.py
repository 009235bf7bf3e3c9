"""Answers of /v1/messages, whole and as events, made of a chat answer's parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from pydantic_core import from_json

from specdec.inference.commit import Delta, FinishReason
from specdec.inference.gateway.answers.errors import MESSAGES, ApiError
from specdec.inference.gateway.answers.events import EventFormat, JsonEvent
from specdec.inference.gateway.answers.formats import metrics
from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.gateway.answers.parts import Choice, ChoiceEvent, Part
from specdec.inference.workers.completion import Codec

Events: TypeAlias = AsyncGenerator[ChoiceEvent, None]
_THINKING = {"type": "thinking", "thinking": "", "signature": ""}
_EMPTY = {"reasoning_content": _THINKING, "content": {"type": "text", "text": ""}}
"""Table from each field with text in a chat's "delta" to the empty content block that this text begins."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat(EventFormat):
    """Format of the answers of /v1/messages.

    An answer is a message whose content is a list of blocks, of which only the last one still grows. The parameters are
    those of `EventFormat`.
    """

    def __init__(self, model: str, reader: Callable[[str], MessageReader | None]) -> None:
        super().__init__(model, reader)
        head = {"id": f"msg_{self._chat.answer_id}", "type": "message", "role": "assistant", "model": model}
        self._fields: dict[str, Any] = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
        self._pieces: list[str] = []  # of the block that grows
        self._last: object = None  # field of a chat's delta that it is made of, or number of its call

    async def noting_stop(self, events: Events, stops: Sequence[str], codec: Codec) -> Events:
        """Yield the events unchanged; put the stop string that ended the text into the answer's "stop_sequence".

        The text ends before a stop string, so the string is looked for in the text that `codec` makes of the tokens.
        """
        token_ids: list[int] = []
        async with aclosing(events):
            async for index, event in events:
                token_ids += event.token_ids if isinstance(event, Delta) else ()
                if isinstance(event, Delta) and event.finish_reason is FinishReason.STOP:
                    text = await codec.decode(token_ids)
                    found = (stop for stop in stops if stop in text)
                    self._fields["stop_sequence"] = min(found, key=text.find, default=None)
                yield index, event

    def add(self, part: Part, choice: Choice) -> Iterator[JsonEvent]:
        """Add a part of the answer; yield the events for the client: for an empty part, a ping."""
        entry = self._chat.chunk(0, part, choice)
        delta, reason = entry["delta"], entry["finish_reason"]
        self._fields["stop_reason"] = "stop_sequence" if self._fields["stop_sequence"] else _REASONS.get(reason)
        yield from self._begin(choice)
        if not (part.accepted or part.text or reason):
            yield {"type": "ping"}
        for name, empty in _EMPTY.items():
            if text := delta.get(name):
                yield from self._grow(name, text, empty)
        for call in delta.get("tool_calls", ()):
            head = {"type": "tool_use", "id": call.get("id"), "name": call["function"].get("name"), "input": {}}
            yield from self._grow(call["index"], call["function"]["arguments"], head)

    def _begin(self, choice: Choice) -> Iterator[JsonEvent]:
        """Yield the event message_start, which has the number of prompt tokens, unless this was done before."""
        if "usage" not in self._fields:
            self._fields["usage"] = _usage(choice)
            nothing = {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**self._fields, **nothing}}

    def _grow(self, key: object, text: str, new: dict[str, Any]) -> Iterator[JsonEvent]:
        """Add text to the last block of content, or to a new one; yield the events for the client.

        It is the last block if that has the same `key`: the name of a field of a chat's delta, or the number of a tool
        call. Otherwise `new` is the new block, still empty.
        """
        if self._last != key:
            yield from self._stop()
            self._last = key
            self._fields["content"].append(dict(new))
            yield self._event("content_block_start", content_block=self._fields["content"][-1])
        self._pieces.append(text)
        yield self._event("content_block_delta", delta=_delta(new["type"], text))

    def _stop(self) -> Iterator[JsonEvent]:
        """Complete the block that grows, if there is one; yield the events for the client."""
        if self._last is not None:
            text, block = "".join(self._pieces), self._fields["content"][-1]
            block |= {"input": _input(text)} if block["type"] == "tool_use" else {block["type"]: text}
            self._pieces, self._last = [], None
            yield self._event("content_block_stop")

    def _event(self, kind: str, **fields: Any) -> JsonEvent:
        return {"type": kind, "index": len(self._fields["content"]) - 1, **fields}

    def closing(self, choice: Choice) -> Iterator[JsonEvent]:
        """Complete the last block and the message; yield the events for the client."""
        yield from self._begin(choice)
        yield from self._stop()
        end = {name: self._fields[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": end, "usage": _usage(choice)}
        yield {"type": "message_stop"}

    def failing(self, error: ApiError) -> Iterator[JsonEvent]:
        """Yield the event that reports a failure to the client, and ends the stream."""
        yield error.body(MESSAGES)

    def ended(self, choice: Choice) -> dict[str, Any]:
        """Return the whole message, with its usage."""
        return {**self._fields, "usage": _usage(choice), **metrics([choice])}


def _delta(kind: str, text: str) -> dict[str, str]:
    """Return the "delta" of an event that adds text to a block of this kind; a call's arguments are added as JSON."""
    name, field = ("input_json_delta", "partial_json") if kind == "tool_use" else (f"{kind}_delta", kind)
    return {"type": name, field: text}


def _input(text: str) -> dict[str, Any]:
    """Return a call's arguments from their JSON text; of cut-off JSON the complete part; {} if it is not an object."""
    try:
        return dict(from_json(text, allow_partial=True, allow_inf_nan=False))
    except (ValueError, TypeError):
        return {}


def _usage(choice: Choice) -> dict[str, int]:
    """Return the "usage" of a message; prompt tokens found in the cache are not counted as "input_tokens"."""
    cached = choice.num_cached_tokens
    read = {"input_tokens": choice.num_prompt_tokens - cached, "cache_read_input_tokens": cached}
    return {**read, "cache_creation_input_tokens": 0, "output_tokens": choice.num_output_tokens}
