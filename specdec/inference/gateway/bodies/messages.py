"""Body of /v1/messages (Anthropic's Messages API), which is turned into the body of a chat.

Fields that are not listed are ignored, since Anthropic's clients send new ones with every version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator

from specdec.inference.gateway.bodies import noops
from specdec.inference.gateway.bodies.body import SentBack, Text
from specdec.inference.gateway.bodies.conversation import (
    FUNCTIONS_ALONE,
    TEXT_ALONE,
    FunctionBody,
    FunctionName,
    Parameters,
    Parts,
    PartsOf,
    ToolsOf,
    of_kinds,
)
from specdec.inference.gateway.bodies.mapped import MappedBody, add_result, format_of_chat, text_of
from specdec.inference.gateway.bodies.responses import FlatSchemaFormat
from specdec.inference.gateway.bodies.schema import NumTokens, Stops
from specdec.inference.text.chat import MAX_MESSAGES

_NEEDED = {"redacted_thinking": (), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}
"""Fields that a block must have, by its type; a block of another type must have the field with the type's name."""


class Block(SentBack):
    """Block of a message's content: a text, a thought, a call of a tool, or a call's result.

    Blocks of type redacted_thinking are accepted and left out.
    """

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: Text = ""
    thinking: Text = ""
    id: Text = ""
    name: Text = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: Text = ""
    content: Text | Parts = Field(default="", description="Of a tool's result.")

    @model_validator(mode="after")
    def _check_fields(self) -> Block:
        if missing := [name for name in _NEEDED.get(self.type, (self.type,)) if name not in self.model_fields_set]:
            raise ValueError(f"a block of type {self.type} needs {' and '.join(missing)}")
        return self

    def call(self) -> dict[str, Any]:
        """Return this block, which is of type tool_use, as an entry of "tool_calls" in a chat's message."""
        return {"id": self.id, "function": {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}}


Blocks: TypeAlias = PartsOf[Annotated[Block, of_kinds("a block", "text", "thinking", *_NEEDED, hint=TEXT_ALONE)]]


class BlockMessage(SentBack):
    """Message of a conversation in the form of /v1/messages, with a text or a list of blocks as its content."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the message to a chat's: first each result of a tool as a message of its own, then all else as one."""
        blocks = [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [block for block in blocks if block.type == "tool_result"]
        for each in results:
            add_result(messages, each.tool_use_id, text_of(each.content))
        said = {
            "content": "\n".join(block.text for block in blocks if block.type == "text"),
            "reasoning_content": "\n".join(block.thinking for block in blocks if block.type == "thinking"),
            "tool_calls": [block.call() for block in blocks if block.type == "tool_use"],
        }
        if any(said.values()) or not results:
            messages.append({"role": self.role, "content": "", **{name: each for name, each in said.items() if each}})


class InputTool(FunctionBody):
    """Function that the model may call, in the form of /v1/messages."""

    type: Literal["custom"] = "custom"
    parameters: Parameters | None = Field(None, alias="input_schema")


class Choice(SentBack):
    """Choice whether the model must call a tool (any, or the one named), may call one (auto), or must not (none)."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(default=None, description="Of type tool: the tool that must be called.")
    disable_parallel_tool_use: bool = False


class Thinking(SentBack):
    """Choice whether the model thinks, for chat templates with a variable for it; a budget of tokens has no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputConfig(SentBack):
    """Settings of the output: a JSON schema that it must fit; other settings have no effect."""

    format: FlatSchemaFormat | None = None


class MessagesBody(MappedBody, SentBack):
    """Body of /v1/messages. Its sampling parameters and its template variables are the same as in a chat's body."""

    model_config = ConfigDict(extra="ignore")

    no_ops = noops.MESSAGES
    conversation_field = "messages"
    messages: Annotated[list[BlockMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | Parts = ""
    max_tokens: NumTokens | None = Field(None, description="Unset: to the end of the context.")
    stop_sequences: Stops = Field(default_factory=list)
    tools: ToolsOf[Annotated[InputTool, of_kinds("a tool", "custom", hint=FUNCTIONS_ALONE)]] = Field(
        default_factory=list
    )
    tool_choice: Choice = Choice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)

    def _mapped(self) -> Iterator[tuple[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        for message in self.messages:
            message.add_to(messages)
        yield "messages", messages
        last = messages[-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:  # the answer goes on with it
            yield from (("add_generation_prompt", False), ("continue_final_message", True))
        functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools]
        yield "tools", [{"type": "function", "function": function} for function in functions]
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        yield "tool_choice", {"any": "required", "tool": named}.get(choice.type, choice.type)
        yield "parallel_tool_calls", not choice.disable_parallel_tool_use
        yield "max_completion_tokens", self.max_tokens
        yield "stop", self.stop_sequences or self.stop
        if self.thinking:
            yield "enable_thinking", self.thinking.type != "disabled"
        if form := self.output_config.format:
            yield "response_format", format_of_chat(form)
