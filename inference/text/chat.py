"""A conversation and what belongs to it, as a chat template reads them. Knows no tokens.

Tools and calls travel as JSON and are read here, so that whoever owns the template is the only one who has to.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

from inference.errors import InvalidRequestError

MAX_MESSAGES = 1024
"""Of one conversation."""
MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 128
MAX_TOOLS_CHARACTERS = 128 * 1024
MAX_TEMPLATE_KWARGS_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message.

    Attributes:
        tool_calls_json: calls that the assistant made, a JSON array as OpenAI has it; empty: none.
        tool_call_id, name: of a tool's answer: which call it answers, and the function's name.
        reasoning: what the assistant thought before its content.
    """

    role: str
    content: str = ""
    tool_calls_json: str = ""
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    def for_template(self, place: str) -> dict[str, Any]:
        """As templates have it; a field that is empty is not there, since templates ask whether it is.

        Raises:
            InvalidRequestError: the calls are none, naming the `place`.
        """
        others = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        calls = {"tool_calls": _calls(self.tool_calls_json, place)} if self.tool_calls_json else {}
        said = {key: value for key, value in others.items() if value}
        return {"role": self.role, "content": self.content, **calls, **said}

    @property
    def num_characters(self) -> int:
        return sum(map(len, astuple(self)))


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to answer.

    Attributes:
        tools_json: the functions that may be called, a JSON array as OpenAI has it; empty: none.
        template_kwargs_json: further variables of the template, a JSON object; empty: none.
    """

    messages: tuple[ChatMessage, ...]
    tools_json: str = ""
    template_kwargs_json: str = ""

    @classmethod
    def of(cls, *messages: tuple[str, str]) -> Chat:
        """A conversation of (role, content) pairs."""
        return cls(tuple(ChatMessage(role, content) for role, content in messages))

    def conversation(self) -> list[dict[str, Any]]:
        """The messages for a template."""
        return [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def tools(self) -> list[Any] | None:
        """The functions for a template; None if there are none."""
        return _read(self.tools_json, list, "tools") if self.tools_json else None

    def template_kwargs(self) -> dict[str, Any]:
        """The further variables."""
        return _read(self.template_kwargs_json, dict, "chat_template_kwargs") if self.template_kwargs_json else {}

    def check(self) -> int:
        """Refuse what is beyond the limits, before any of it is read; how many characters there are in all.

        Raises:
            InvalidRequestError: naming value and limit.
        """
        _check("messages", "elements", len(self.messages), MAX_MESSAGES)
        longest = max((len(message.role) for message in self.messages), default=0)
        _check("messages: a role", "characters", longest, MAX_ROLE_CHARACTERS)
        _check("tools", "characters", len(self.tools_json), MAX_TOOLS_CHARACTERS)
        _check("chat_template_kwargs", "characters", len(self.template_kwargs_json), MAX_TEMPLATE_KWARGS_CHARACTERS)
        return sum(message.num_characters for message in self.messages) + len(self.tools_json)


def _check(what: str, unit: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{what} has {count} {unit}, the limit is {limit}", field=_field(what))


def _calls(text: str, place: str) -> list[Any]:
    """The calls with their arguments as objects, which is what templates write down.

    Arguments that are no object stay text: the model may have been cut, and hears of it in the answer to its call.
    """
    calls: list[Any] = _read(text, list, f"{place}.tool_calls")
    for i, call in enumerate(calls):
        function, where = call.get("function"), f"{place}.tool_calls[{i}].function"
        if not isinstance(function, dict):
            raise InvalidRequestError(f"{where}: an object is expected", field="messages")
        if isinstance(arguments := function.get("arguments"), str):
            with suppress(InvalidRequestError):
                function["arguments"] = _read(arguments or "{}", dict, where)
    return calls


def _read(text: str, kind: type, place: str) -> Any:
    """A JSON document of a kind; of a list, every item is an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"{place}: no JSON ({exc})", field=_field(place)) from exc
    items = value if isinstance(value, list) else []
    if not isinstance(value, kind) or not all(isinstance(item, dict) for item in items):
        expected = "a JSON object" if kind is dict else "a JSON array of objects"
        raise InvalidRequestError(f"{place}: {expected} is expected", field=_field(place))
    _check(place, "elements", len(items), MAX_TOOLS)
    return value


def _field(place: str) -> str:
    """Of a place in the request, the field of it."""
    return place.partition(":")[0].partition("[")[0]
