"""Parts of bodies that describe a conversation: messages, tools, calls, and variables of the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specdec.inference.gateway.bodies import noops
from specdec.inference.gateway.bodies.body import Body, SentBack, Text
from specdec.inference.text.chat import MAX_ROLE_CHARACTERS, MAX_TOOLS, Chat, ChatMessage
from specdec.inference.text.json_schema import closed
from specdec.inference.text.unicode import check_unicode

MAX_PARTS = 1024
"""Most parts of the content of one message, or of one item of /v1/responses."""
TEXT_ALONE = "this model reads text alone"
FUNCTIONS_ALONE = "tools are functions; give this one as a function with a text parameter"
OTHER_CHOICES = "give the tools that may be called as tools, with tool_choice none, auto, required, or one function"
FunctionName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


T = TypeVar("T")
PartsOf: TypeAlias = Annotated[list[T], Field(max_length=MAX_PARTS, fail_fast=True)]
ToolsOf: TypeAlias = Annotated[list[T], Field(max_length=MAX_TOOLS, fail_fast=True)]


def of_kinds(what: str, *kinds: str, hint: str) -> BeforeValidator:
    """Return a validator that refuses an object whose "type" is none of `kinds`.

    Args:
        what: name of the object in the message, such as "a part".
        hint: end of the message, which says what to send instead.
    """

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            shown = kind[:40].encode(errors="backslashreplace").decode()  # it may be half of a surrogate pair
            message = f"{what} of type {shown} is not supported here: {hint}"
            raise PydanticCustomError(noops.UNSUPPORTED, "{message}", {"message": message})
        return value

    return BeforeValidator(check)


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if (kind := schema.get("type", "object")) != "object":
        raise ValueError(f"type {json.dumps(kind)[:40]} is not supported: arguments are an object")
    return schema


Parameters: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(_of_object),
    Field(json_schema_extra={"properties": {"type": {"const": "object"}}}),
]


class FunctionBody(SentBack):
    """Function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: Parameters | None = Field(None, description="A JSON schema of an object. Unset: there are none.")
    strict: bool | None = Field(
        None,
        description="Arguments keep to the schema also where the model may call or not, and have no other properties.",
    )

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Return the JSON schema of the arguments, or None if the function has no `parameters`.

        If `strict` is set, the schema allows only the arguments that it names.

        Raises:
            ValueError: a strict schema asks for other properties than it names.
        """
        if self.parameters is None or not self.strict:
            return self.parameters
        return dict(closed({"type": "object", **self.parameters}))


class Tool(SentBack):
    """Tool that the model may use; functions are the only kind."""

    no_ops = noops.TOOL
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """Name of the function that the model must call."""

    name: FunctionName


class NamedTool(Body):
    """Choice of the one tool that the model must use."""

    type: Literal["function"]
    function: NamedFunction


Tools: TypeAlias = ToolsOf[Annotated[Tool, of_kinds("a tool", "function", hint=FUNCTIONS_ALONE)]]
ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    of_kinds("tool_choice", "function", hint=OTHER_CHOICES),
]


def check_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Check that tools have different names, and that `choice` can be obeyed with them.

    Raises:
        ValueError: a name comes twice, the chosen tool is missing, or one is required and there is none.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError(f"tools name {next(name for name in names if names.count(name) > 1)} twice")
    if choice == "required" and not tools:
        raise ValueError("tool_choice required needs tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ValueError(f"tool_choice names {choice.function.name}, which is none of the tools")


class TextPart(SentBack):
    """Part of a message's content with text; in one of type refusal, the text stands in the field `refusal`."""

    type: Literal["text", "refusal"]
    text: Text = Field(validation_alias=AliasChoices("text", "refusal"))


Parts: TypeAlias = PartsOf[Annotated[TextPart, of_kinds("a part", "text", "refusal", hint=TEXT_ALONE)]]


class CalledFunction(SentBack):
    """Function that the assistant called, with the arguments as JSON text."""

    name: Text
    arguments: Text


class Call(SentBack):
    """Call of a function that the assistant made, in a message sent back."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(SentBack):
    """Message of a conversation, in the form of /v1/chat/completions."""

    no_ops = noops.MESSAGE
    role: Annotated[Text, StringConstraints(min_length=1, max_length=MAX_ROLE_CHARACTERS)]
    content: Text | Parts = ""
    name: Text | None = Field(None, description="Of a tool's answer: the function. Of others: accepted without effect.")
    tool_calls: ToolsOf[Call] = Field(default_factory=list)
    tool_call_id: Text | None = Field(None, description="Of a tool's answer: the call.")
    reasoning_content: Text | None = Field(
        None,
        validation_alias=AliasChoices("reasoning_content", "reasoning"),
        description="What the assistant thought; templates may leave it out. Also read from `reasoning`.",
    )
    refusal: Text | None = Field(None, description="Content of an assistant's message that has no other.")

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if "content" not in self.model_fields_set and not self.tool_calls and self.role != "assistant":
            raise ValueError("content is needed, but in an assistant's message")
        return self

    def message(self) -> ChatMessage:
        """Return the message as a `ChatMessage`, the form in which a `Chat` has its messages.

        Raises:
            InvalidRequestError: a text is not valid UTF-8.
        """
        return ChatMessage.read(self.model_dump(), "messages")


class TemplateBody(Body):
    """Base class of bodies with a conversation: fields for the variables of the chat template, and the prompt's end."""

    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="vLLM's: further variables of the model's chat template."
    )
    enable_thinking: bool | None = Field(None, description="The same as in chat_template_kwargs.")

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For templates that know it; beside others, only medium, which changes nothing."
    )

    add_generation_prompt: bool = Field(True, description="vLLM's: the prompt ends where the assistant begins.")
    continue_final_message: bool = Field(
        False, description="vLLM's, with add_generation_prompt false: the answer goes on with the last message."
    )

    @model_validator(mode="after")
    def _check_end(self) -> TemplateBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    def template_kwargs(self) -> dict[str, Any]:
        """Return the variables that the body sets for the chat template, and arguments that say how the prompt ends."""
        named = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        ends = {} if self.add_generation_prompt else {"add_generation_prompt": False}
        ends |= {"continue_final_message": True} if self.continue_final_message else {}
        return {**self.chat_template_kwargs, **{name: each for name, each in named.items() if each is not None}, **ends}


def chat_of(messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: dict[str, Any]) -> Chat:
    """Return a conversation with its tools and template variables, for the server that has the chat template.

    Args:
        template_kwargs: variables of the chat template, as `TemplateBody.template_kwargs` returns them.

    Raises:
        InvalidRequestError: a text is not valid UTF-8, or a part exceeds its limit.
    """
    spoken = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
    chat = Chat(
        tuple(message.message() for message in messages),
        _json(spoken, "tools"),
        _json(template_kwargs, "chat_template_kwargs"),
    )
    chat.check()
    return chat


def _json(value: Any, name: str) -> str:
    if not value:
        return ""
    text = json.dumps(value, ensure_ascii=False)
    check_unicode(text, name)
    return text
