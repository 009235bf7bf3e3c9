"""Body of /v1/responses (OpenAI's Responses API), which is turned into the body of a chat.

The server stores no conversation: each request has it whole, as a list of items. Fields that refer to an earlier answer
are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, Discriminator, Field, Tag

from specdec.inference.gateway.bodies import noops
from specdec.inference.gateway.bodies.body import Body, SentBack, Text
from specdec.inference.gateway.bodies.conversation import (
    FUNCTIONS_ALONE,
    OTHER_CHOICES,
    TEXT_ALONE,
    FunctionBody,
    NamedFunction,
    PartsOf,
    ToolsOf,
    of_kinds,
)
from specdec.inference.gateway.bodies.mapped import MappedBody, add_result, format_of_chat, text_of
from specdec.inference.gateway.bodies.schema import (
    JsonObjectFormat,
    NamedSchema,
    NumLogprobs,
    NumTokens,
    TextFormat,
)
from specdec.inference.text.chat import MAX_MESSAGES

LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal")


class ItemPart(SentBack):
    """Part of an item's content, with text."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal"]
    text: Text = Field(validation_alias=AliasChoices("text", "refusal"))


ItemParts: TypeAlias = PartsOf[Annotated[ItemPart, of_kinds("a part", *_TEXTS, hint=TEXT_ALONE)]]


class MessageItem(SentBack):
    """Item that is a message of the client, or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | ItemParts

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the message to those of a chat.

        An assistant's text is put into the chat's last message if that is the assistant's and has only reasoning.
        """
        text = text_of(self.content)
        if self.role == "assistant":
            _of_assistant(messages, "content", "tool_calls")["content"] = text
        else:
            messages.append({"role": "system" if self.role == "developer" else self.role, "content": text})


class CallItem(SentBack):
    """Item that is a call of a function, from an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the call to a chat's last message if that is the assistant's, else to a new message of the assistant."""
        call = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
        _of_assistant(messages).setdefault("tool_calls", []).append(call)


class OutputItem(SentBack):
    """Item with the output of a function that was called."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | ItemParts

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the output to a chat's messages, as one of the role "tool"."""
        add_result(messages, self.call_id, text_of(self.output))


class ReasoningItem(SentBack):
    """Item with the reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: ItemParts = Field(default_factory=list)
    content: ItemParts = Field(default_factory=list)

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the reasoning to a chat, as the beginning of a new message of the assistant."""
        text = text_of(self.content or self.summary)
        _of_assistant(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text


def _of_assistant(messages: list[dict[str, Any]], *but_with: str) -> dict[str, Any]:
    """Return the assistant's message to which an item is to be added.

    That is the chat's last message; if it is not the assistant's, or has one of the fields `but_with`, a new message is
    appended.
    """
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & set(but_with):
        messages.append({"role": "assistant"})
    return messages[-1]


_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_ITEM_HINT = f"it takes {', '.join(_KINDS)}, and stores nothing that an item could refer to"


def _tag(value: Any) -> str:
    """Return the tag by which Pydantic chooses the class for an item, or for the input as a whole.

    Tags have a space in them, by which errors.py tells them from names of fields in Pydantic's paths to faults.
    """
    if not isinstance(value, dict | SentBack):
        return "a text" if isinstance(value, str) else "a list"
    return f"a {(value.get('type') or 'message') if isinstance(value, dict) else vars(value)['type']}"


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a function_call")]
    | Annotated[OutputItem, Tag("a function_call_output")]
    | Annotated[ReasoningItem, Tag("a reasoning")],
    Discriminator(_tag, custom_error_type="item_type", custom_error_message="an item must be an object"),
    of_kinds("an item", *_KINDS, hint=_ITEM_HINT),
]
Items: TypeAlias = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class FlatTool(FunctionBody):
    """Function that the model may call; its fields stand in the tool itself, where a chat has an object "function"."""

    type: Literal["function"]


class FlatNamedTool(NamedFunction):
    """Choice of the one function that the model must call, with its name beside the type."""

    type: Literal["function"]


class FlatSchemaFormat(NamedSchema):
    """Output format for JSON that fits a schema; its fields stand beside the type, where a chat has "json_schema"."""

    type: Literal["json_schema"]


class TextConfig(Body):
    """Settings of the answer's text: its format."""

    no_ops = noops.TEXT_CONFIG
    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] = Field(
        default_factory=lambda: TextFormat(type="text")
    )


class ReasoningConfig(Body):
    """Settings of the reasoning, each accepted only with values that change nothing (noops.py)."""

    no_ops = noops.REASONING_CONFIG


class ResponsesBody(MappedBody):
    """Body of /v1/responses. Its sampling parameters and its template variables are the same as in a chat's body."""

    no_ops = noops.RESPONSES
    conversation_field = "input"
    input: Annotated[Annotated[Text, Tag("a text")] | Annotated[Items, Tag("a list")], Discriminator(_tag)]
    instructions: Text | None = Field(None, description="A system message before the input.")
    tools: ToolsOf[Annotated[FlatTool, of_kinds("a tool", "function", hint=FUNCTIONS_ALONE)]] = Field(
        default_factory=list
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FlatNamedTool,
        of_kinds("tool_choice", "function", hint=OTHER_CHOICES),
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    max_output_tokens: NumTokens | None = Field(None, description="Unset: to the end of the context.")
    top_logprobs: NumLogprobs | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list, description="Reasoning is never encrypted, so the second changes nothing."
    )
    max_tool_calls: int | None = Field(None, description="Accepted without effect: the server calls no tools itself.")

    def _mapped(self) -> Iterator[tuple[str, Any]]:
        yield "messages", self._messages()
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools]
            yield "tools", [{"type": "function", "function": function} for function in functions]
        choice = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            yield "tool_choice", {"type": "function", "function": {"name": choice.name}}
        else:
            yield "tool_choice", choice
        yield "parallel_tool_calls", self.parallel_tool_calls
        yield "max_completion_tokens", self.max_output_tokens
        yield "response_format", format_of_chat(self.text.format)
        if self.top_logprobs is not None or LOGPROBS in self.include:
            yield from (("logprobs", True), ("top_logprobs", self.top_logprobs))

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            item.add_to(messages)
        return [{"content": "", **message} for message in messages]

    def echoed(self) -> dict[str, Any]:
        """Return the fields of the request that the answer repeats, ready for JSON."""
        names = {"instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "max_output_tokens", "metadata"}
        names |= {"temperature", "top_p", "top_logprobs"}
        return self.model_dump(mode="json", by_alias=True, include=names)
