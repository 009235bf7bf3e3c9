"""Conversation with the tools that the model may call, for a chat template. This module knows no tokens.

Between processes, tools and calls stay texts of JSON; only the process that has the chat template parses them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from difflib import get_close_matches
from typing import Any

from specdec.inference.errors import InvalidRequestError
from specdec.inference.text.unicode import check_unicode

logger = logging.getLogger(__name__)

MAX_MESSAGES = 1024
"""Limit of messages in one conversation."""
MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 128
MAX_TOOLS_CHARACTERS = 128 * 1024
MAX_TEMPLATE_KWARGS_CHARACTERS = 4096
MAX_NOTED = 256
"""Most misspelled names of fields that one process warns of in its log; each is named once, since clients repeat the
same misspelling in every message."""
MAX_NOTED_CHARACTERS = 64
_MIN_LIKENESS = 0.8
"""Least similarity, by difflib, at which a field's unknown name counts as a misspelling of a known one. The names
reasoning_details and reasoning_content, which are two fields, are less similar."""
_NOTED: set[tuple[str, str]] = set()
_NO_PARAMETERS = {"type": "object", "properties": {}}
_TEXTS = {**{name: name for name in ("role", "content", "name", "tool_call_id")}, "reasoning_content": "reasoning"}
"""Table from each field of a message in OpenAI's API that is a text, to the field of `ChatMessage` that holds it.

The field `name` is read only from messages of the role "tool".
"""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """Message of a conversation; fields that do not apply are empty.

    Attributes:
        role: role of the message's author, such as user.
        tool_calls_json: calls of tools that the assistant made: a JSON array in the form of OpenAI's API.
        tool_call_id, name: in a tool's answer, the id of the call that it answers, and the function's name.
        reasoning: what the assistant thought before it wrote its content.
    """

    role: str
    content: str = ""
    tool_calls_json: str = ""
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @classmethod
    def read(cls, message: Mapping[str, Any], place: str) -> ChatMessage:
        """Return a message that is given as in OpenAI's API; the texts in its content are joined by newlines.

        An assistant's refusal becomes its content if it has no other. Fields with other names are ignored.

        Args:
            place: path of the message in the request, for errors.

        Raises:
            InvalidRequestError: the message is malformed.
        """
        given = {name: value for name, value in message.items() if value is not None}
        note_ignored("message", given, (*_TEXTS, "tool_calls"))
        calls = given.get("tool_calls")
        if isinstance(parts := given.get("content"), list):
            given["content"] = "\n".join(_text_of(part, f"{place}.content[{i}]") for i, part in enumerate(parts))
        if given.get("role") == "assistant" and not given.get("content"):
            given["content"] = given.get("refusal", "")
        others = {"content": "" if calls else None, "reasoning_content": given.get("reasoning", "")}
        texts = {name: given.get(name, others.get(name, "")) for name in _TEXTS}
        for name, text in texts.items():
            if not isinstance(text, str):
                fields = ", ".join(_TEXTS)
                raise InvalidRequestError(
                    f"{place}.{name}: a message has texts ({fields}) and tool_calls", field=_field(place)
                )
            check_unicode(text, f"{place}.{name}")
        kept = {_TEXTS[name]: text for name, text in texts.items() if name != "name" or texts["role"] == "tool"}
        return cls(**kept, tool_calls_json=json.dumps(calls) if calls else "")

    def for_template(self, place: str) -> dict[str, Any]:
        """Return the message as chat templates read it, without empty fields, since templates test for them.

        Args:
            place: path of the message in the request, for errors.

        Raises:
            InvalidRequestError: the calls are malformed.
        """
        others = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        calls = {"tool_calls": _calls(self.tool_calls_json, place)} if self.tool_calls_json else {}
        given = {key: value for key, value in others.items() if value}
        return {"role": self.role, "content": self.content, **calls, **given}

    @property
    def num_characters(self) -> int:
        return sum(map(len, astuple(self)))


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversation that a model is to answer.

    Attributes:
        tools_json: tools that the model may call: a JSON array in the form of OpenAI's API; empty if there are none.
        template_kwargs_json: further variables of the chat template: a JSON object; empty if there are none.
    """

    messages: tuple[ChatMessage, ...]
    tools_json: str = ""
    template_kwargs_json: str = ""

    @classmethod
    def read(cls, messages: Sequence[Mapping[str, Any]]) -> Chat:
        """Return a conversation whose messages are given as in OpenAI's API.

        Raises:
            InvalidRequestError: a message is malformed, or a limit is exceeded.
        """
        chat = cls(tuple(ChatMessage.read(message, f"messages[{i}]") for i, message in enumerate(messages)))
        chat.check()
        return chat

    @classmethod
    def of(cls, *messages: tuple[str, str]) -> Chat:
        """Return a conversation of (role, content) pairs."""
        return cls(tuple(ChatMessage(role, content) for role, content in messages))

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them: dictionaries as in OpenAI's API, without empty fields.

        Raises:
            InvalidRequestError: the tool calls in a message are malformed.
        """
        return [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def tools(self) -> list[Any] | None:
        """Return the tools as chat templates read them; None if there are none.

        A missing description becomes an empty text, and missing parameters the JSON schema of an object without any,
        since many templates print both without a check.

        Raises:
            InvalidRequestError: they are not a JSON array of objects.
        """
        return [_spoken(tool) for tool in _read(self.tools_json, list, "tools")] if self.tools_json else None

    def template_kwargs(self) -> dict[str, Any]:
        """Return the further variables of the chat template that the request sets, by name; empty if there are none.

        Raises:
            InvalidRequestError: they are not a JSON object.
        """
        return _read(self.template_kwargs_json, dict, "chat_template_kwargs") if self.template_kwargs_json else {}

    def check(self) -> int:
        """Check the conversation's lengths against their limits; return its number of characters, with the tools.

        No JSON is parsed for this.

        Raises:
            InvalidRequestError: a limit is exceeded; the message names value and limit.
        """
        _check("messages", "elements", len(self.messages), MAX_MESSAGES)
        longest = max((len(message.role) for message in self.messages), default=0)
        _check("messages: a role", "characters", longest, MAX_ROLE_CHARACTERS)
        _check("tools", "characters", len(self.tools_json), MAX_TOOLS_CHARACTERS)
        _check("chat_template_kwargs", "characters", len(self.template_kwargs_json), MAX_TEMPLATE_KWARGS_CHARACTERS)
        return sum(message.num_characters for message in self.messages) + len(self.tools_json)


def note_ignored(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Log a warning for each name in `given` that looks like a misspelling of one in `known`, once in this process.

    Args:
        what: name of the kind of object that has the fields, for the log.
        given: names of the fields that a client has sent.
        known: names of the fields that are read.
    """
    for name in {*given} - {*known}:
        if len(_NOTED) < MAX_NOTED and len(name) <= MAX_NOTED_CHARACTERS and (what, name) not in _NOTED:
            _NOTED.add((what, name))
            for meant in get_close_matches(name, known, 1, _MIN_LIKENESS):
                logger.warning("the field %r of a %s is ignored; did you mean %s?", name, what, meant)


def _spoken(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(function := tool.get("function"), dict):
        return tool
    parameters = function.get("parameters") or {}
    if isinstance(parameters, dict):
        parameters |= {name: value for name, value in _NO_PARAMETERS.items() if name not in parameters}
    description = function.get("description") or ""
    return {**tool, "function": {**function, "description": description, "parameters": parameters}}


def one_template(named: Mapping[str, str]) -> str | None:
    """Return one chat template made of a model's templates "default" and "tool_use"; None if it has neither.

    As in Transformers, a conversation with tools gets "tool_use" if the model has it, and any other gets "default". If
    the model has only "tool_use", the result refuses conversations without tools.

    Args:
        named: the model's chat templates, by name.
    """
    default, with_tools = named.get("default"), named.get("tool_use")
    if with_tools is None:
        return default
    missing = "{{ raise_exception('the model has a chat template for conversations with tools alone') }}"
    # An empty expression keeps Jinja from taking the whitespace beside a statement away.
    parts = [f"{{{{ '' }}}}{part.removesuffix(chr(10))}{{{{ '' }}}}" for part in (with_tools, default or missing)]
    return f"{{% if tools is not none %}}{parts[0]}{{% else %}}{parts[1]}{{% endif %}}"


def _text_of(part: Any, place: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(text := part.get("text", part.get("refusal")), str):
        raise InvalidRequestError(f"{place}: a part with a text is expected", field=_field(place))
    return text


def _check(what: str, unit: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{what} has {count} {unit}, the limit is {limit}", field=_field(what))


def _calls(text: str, place: str) -> list[Any]:
    """Return the tool calls in a JSON text, with their arguments as objects, since chat templates print them.

    Arguments that are not a JSON object stay text: the model's output may have been cut off within them.
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
    """Return the value of a JSON text, which must be of the type `kind`: a dict, or a list whose items are dicts.

    Raises:
        InvalidRequestError: it is something else, or a list above `MAX_TOOLS`; the message names the `place`.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"{place}: not valid JSON ({exc})", field=_field(place)) from exc
    items = value if isinstance(value, list) else []
    if not isinstance(value, kind) or not all(isinstance(item, dict) for item in items):
        expected = "a JSON object" if kind is dict else "a JSON array of objects"
        raise InvalidRequestError(f"{place}: {expected} is expected", field=_field(place))
    _check(place, "elements", len(items), MAX_TOOLS)
    return value


def _field(place: str) -> str:
    """Return the name of the request's field in which `place`, a path such as messages[0].content, begins."""
    return place.partition(":")[0].partition("[")[0]
