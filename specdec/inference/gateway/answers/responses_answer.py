"""Answers of /v1/responses, whole and as events, made of a chat answer's parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specdec.inference.commit import FinishReason
from specdec.inference.gateway.answers.errors import ApiError
from specdec.inference.gateway.answers.events import EventFormat, JsonEvent
from specdec.inference.gateway.answers.formats import chat_logprobs, figures
from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.gateway.answers.parts import Choice, Part
from specdec.inference.gateway.bodies.responses import ResponsesBody

_TEXT = {"type": "output_text", "text": "", "annotations": []}
_NEW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant", "content": []}, _TEXT),
    "reasoning": ("rs", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""}),
}
"""For each kind of output item with text: the prefix of its id, its first fields, and its empty part of content."""


class OutputItems:
    """Output items (messages, reasoning, calls) of one answer, of which only the last one still grows.

    Attributes:
        items: the items so far, as objects of OpenAI's Responses API.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._last: object = None  # kind of the last item, or number of its call

    def add(self, delta: dict[str, Any], logprobs: list[dict[str, Any]]) -> Iterator[JsonEvent]:
        """Add a chat chunk's "delta" and its log-probabilities to the items; yield the events for the client.

        Both have the form that /v1/chat/completions gives them: `logprobs` is the list "content" of its "logprobs".
        """
        if text := delta.get("reasoning_content"):
            yield from self._add_text("reasoning", text, [])
        if delta.get("content") or logprobs:
            yield from self._add_text("message", delta.get("content", ""), logprobs)
        for call in delta.get("tool_calls", ()):
            yield from self._add_call(call)

    def _add_text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[JsonEvent]:
        prefix, fields, part = _NEW[kind]
        if self._last != kind:
            yield from self._begin(kind, {"type": kind, "id": _id(prefix), **fields, "content": []})
            self.items[-1]["content"].append(dict(part))
            yield self._event("response.content_part.added", content_index=0, part=dict(part))
        part = self.items[-1]["content"][0]
        part["text"] += text
        beside = {"logprobs": logprobs} if kind == "message" else {}
        if logprobs:
            part["logprobs"] = [*part.get("logprobs", ()), *logprobs]
        yield self._event(f"response.{part['type']}.delta", content_index=0, delta=text, **beside)

    def _add_call(self, call: dict[str, Any]) -> Iterator[JsonEvent]:
        function = call["function"]
        if self._last != call["index"]:
            fields = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._begin(call["index"], {"type": "function_call", "id": _id("fc"), **fields})
        self.items[-1]["arguments"] += function["arguments"]
        if function["arguments"]:
            yield self._event("response.function_call_arguments.delta", delta=function["arguments"])

    def require_one(self) -> Iterator[JsonEvent]:
        """Add an empty message if there is no item; yield the events for the client."""
        if not self.items:
            yield from self._add_text("message", "", [])

    def _begin(self, key: object, item: dict[str, Any]) -> Iterator[JsonEvent]:
        yield from self.complete("completed")
        self.items.append({**item, "status": "in_progress"})
        self._last = key
        yield self._event("response.output_item.added", item=_copy(self.items[-1]))

    def complete(self, status: str) -> Iterator[JsonEvent]:
        """Set the status of the last item, if it still grows; yield the events for the client."""
        if self._last is None:
            return
        item, self._last = self.items[-1], None
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            beside = {"logprobs": part.get("logprobs", [])} if item["type"] == "message" else {}
            yield self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **beside)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> JsonEvent:
        beside = {} if kind.startswith("response.output_item") else {"item_id": self.items[-1]["id"]}
        return {"type": kind, **beside, "output_index": len(self.items) - 1, **fields}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


class ResponsesFormat(EventFormat):
    """Format of the answers of /v1/responses, streamed or not.

    Args:
        model: name of the model that the answer names.
        reader: function that takes the prompt's text and returns the splitter of the answer's text, see `EventFormat`.
        body: body of the request, some fields of which the answer repeats.
    """

    is_numbered = True

    def __init__(self, model: str, reader: Callable[[str], MessageReader | None], body: ResponsesBody) -> None:
        super().__init__(model, reader)
        self._fields = {
            "id": f"resp_{self._chat.answer_id}",
            "object": "response",
            "created_at": self._chat.created,
            "model": model,
            **body.echoed(),
            "background": False,
            "store": False,
            "truncation": "disabled",
            **dict.fromkeys(("previous_response_id", "error", "incomplete_details", "usage")),
        }
        self._items = OutputItems()
        self._held: list[Part] = []
        self._num_reasoning_tokens = 0

    def opening(self) -> Iterable[JsonEvent]:
        """Return the events that show the client the response object before its first token."""
        begun = {**self._fields, "status": "in_progress", "output": []}
        return [{"type": kind, "response": begun} for kind in ("response.created", "response.in_progress")]

    def add(self, part: Part, choice: Choice) -> Iterator[JsonEvent]:
        """Add a part of the answer; yield the events for the client."""
        delta = self._chat.chunk(0, part, choice)["delta"]
        self._held.append(part)
        if not delta.keys() - {"role"}:  # what the reader holds back belongs to what comes next
            return
        parts, self._held = self._held, []
        if "reasoning_content" in delta:
            self._num_reasoning_tokens += sum(len(each.accepted) for each in parts)
        scores = [each for held in parts for each in held.logprobs] if "content" in delta else []
        yield from self._items.add(delta, chat_logprobs(scores)["content"])

    def closing(self, choice: Choice) -> Iterator[JsonEvent]:
        """Complete the last item and the response; yield the events for the client.

        An answer without items gets an empty message.
        """
        yield from self._items.require_one()
        yield from self._items.complete(_status(choice))
        yield {"type": f"response.{_status(choice)}", "response": self.ended(choice)}

    def ended(self, choice: Choice) -> dict[str, Any]:
        """Return the response object after the last token, with its output and usage."""
        status = _status(choice)
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        end = {"status": status, "completed_at": int(time.time()), "output": self._items.items, **cut}
        chat = figures([choice], n=1)
        return {**self._fields, **end, **chat, "usage": self._usage(chat["usage"])}

    def failing(self, error: ApiError) -> Iterator[JsonEvent]:
        """Complete an item that a failure cuts off; yield the events for the client, the last with the error."""
        yield from self._items.complete("incomplete")
        fault = {"code": error.code or "server_error", "message": error.body()["error"]["message"]}
        response = {**self._fields, "status": "failed", "output": self._items.items, "error": fault}
        yield {"type": "response.failed", "response": response}

    def _usage(self, chat: dict[str, Any]) -> dict[str, Any]:
        cached = chat["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": chat["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": chat["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self._num_reasoning_tokens,
                **chat["completion_tokens_details"],
            },
            "total_tokens": chat["total_tokens"],
        }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"
