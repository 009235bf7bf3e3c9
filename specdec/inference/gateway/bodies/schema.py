"""Bodies of /v1/completions, /v1/chat/completions, /tokenize and /detokenize, with OpenAI's defaults.

Fields have OpenAI's and vLLM's names. A field that is not listed is refused, unless it is null, or noops.py accepts its
value. The server's OpenAPI schema describes each field, but not the rules that concern several fields together.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field, PrivateAttr, StringConstraints, model_validator

from specdec.inference.gateway.bodies import noops
from specdec.inference.gateway.bodies.body import ALL_WHOLE, WHOLE, Body, Text, check_size
from specdec.inference.gateway.bodies.conversation import (
    Message,
    Parts,
    TemplateBody,
    Tool,
    ToolChoice,
    Tools,
    chat_of,
    check_choice,
)
from specdec.inference.request import (
    BIAS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_GAMMA,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PREDICTION_CHARACTERS,
    RANGES,
    Grammar,
    SamplingParams,
    SeedScope,
)
from specdec.inference.settings import Range
from specdec.inference.text import structured
from specdec.inference.text.chat import MAX_MESSAGES, Chat
from specdec.inference.text.stop_strings import MAX_STOP_CHARACTERS, MAX_STOPS

MAX_CHOICES = 128
"""Most choices of one HTTP request: `n` times the number of its prompts."""
MAX_N = 64
MAX_PROMPTS = 64
MAX_IDS = 1_000_000
MAX_STOP_IDS = 256
DEFAULT_MAX_TOKENS = 16  # OpenAI's, of /v1/completions
MAX_TOKEN_ID = 2**31 - 1


def _limits(limits: Range) -> Any:
    """Return the constraint of a Pydantic field for a range of numbers."""
    return Field(gt=limits.low, le=limits.high) if limits.above else Field(ge=limits.low, le=limits.high)


def _within(name: str) -> Any:
    """Return the constraint of a Pydantic field for the range of the sampling parameter `name`."""
    return _limits(RANGES[name])


TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
NumTokens: TypeAlias = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID), WHOLE]
NumLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True), ALL_WHOLE]
StopString: TypeAlias = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops: TypeAlias = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]
Biases: TypeAlias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$(?!\n)")], Annotated[float, _limits(BIAS)]],
    Field(max_length=MAX_LOGIT_BIASES),
    BeforeValidator(partial(check_size, limit=MAX_LOGIT_BIASES)),
]
GrammarText: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Schema: TypeAlias = dict[str, Any] | GrammarText
Choices: TypeAlias = Annotated[
    list[Annotated[str, StringConstraints(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)
]
Prompt: TypeAlias = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


class StreamOptions(Body):
    """What the events of a stream have besides text."""

    no_ops = noops.STREAM_OPTIONS
    include_usage: bool = Field(default=False, description="A last chunk with the usage.")
    continuous_usage_stats: bool = Field(
        default=False, description="vLLM's: with include_usage, every chunk has the usage so far."
    )
    include_speculation: bool = Field(
        default=False,
        description="Ours: each chunk says which of its tokens are accepted draft tokens, and what a pass rejected.",
    )


class TextFormat(Body):
    """Output format that allows any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Output format that allows any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """JSON schema for an output, with the fields that OpenAI's clients send beside it."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="Objects have no other properties than those named.")
    schema_: dict[str, Any] = Field(alias="schema")


class JsonSchemaFormat(Body):
    """Output format for JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuredOutputs(Body):
    """Body field `structured_outputs` of vLLM, of which exactly one field may be set."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema.")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = Field(None, description="Lark or GBNF.")
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("structured_outputs needs exactly one of json, regex, choice, grammar and json_object")
        return self


class Prediction(Body):
    """Text that the output may repeat, such as a file to be edited; a prediction changes only the speed."""

    type: Literal["content"]
    content: Text | Parts

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationBody(Body):
    """Base class of bodies that ask for generated text: the fields that all of these APIs share."""

    model: str | None = Field(None, description="As in /v1/models, or a path that ends with it. Unset: the one served.")
    temperature: Annotated[float, _within("temperature")] = 1.0
    top_p: Annotated[float, _within("top_p")] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID), WHOLE] = Field(0, description="0 or -1: all.")
    min_p: Annotated[float, _within("min_p")] = 0.0
    repetition_penalty: Annotated[float, _within("repetition_penalty")] = 1.0
    presence_penalty: Annotated[float, _within("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _within("frequency_penalty")] = 0.0
    logit_bias: Biases = Field(
        default_factory=dict, description="By token id.", json_schema_extra={"additionalProperties": False}
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE] | None = Field(
        None, description="Choice i uses seed + i. Unset, or -1 as in vLLM: drawn for each choice."
    )
    seed_scope: SeedScope = Field(SeedScope.ALL, description="Requests of one seed that have one noise.")
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] = 1
    stop: StopString | Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True), ALL_WHOLE] = Field(
        default_factory=list
    )
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    max_completion_tokens: NumTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), WHOLE] = Field(
        0,
        description="No token that would end the text is chosen before; a stop string still ends it.",
    )
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA), WHOLE] | None = Field(
        None, description="Ours: draft tokens per pass; 0 drafts none."
    )
    prediction: Prediction | None = Field(
        None, description=f"Text that the answer may repeat, of up to {MAX_PREDICTION_CHARACTERS} characters."
    )
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's; instead of response_format.")
    guided_json: Schema | None = Field(None, description="vLLM's: a JSON schema.")
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = Field(None, description="Lark or GBNF.")
    user: str | None = Field(None, description="Accepted without effect: it names the end user.")
    safety_identifier: str | None = Field(None, description="Accepted without effect: it names the end user.")
    session_id: str | None = Field(None, description="Accepted without effect: names the conversation.")
    prompt_cache_key: str | None = Field(None, description="Accepted without effect: tokens identify prompts.")
    cache_salt: Annotated[Text, StringConstraints(min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)] | None = Field(
        None, description="vLLM's: what was computed of a prompt serves requests of an equal salt alone."
    )
    return_token_ids: bool = Field(False, description="vLLM's: prompt_token_ids, and token_ids of each choice.")
    request_id: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$(?!\n)")] | None = Field(
        None, description="vLLM's: the answer's id ends with it."
    )
    metadata: dict[str, Any] = Field(default_factory=dict, description="Accepted without effect: for the client.")
    _grammar: tuple[str | None, Grammar | None] = PrivateAttr()

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationBody:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @model_validator(mode="after")
    def _check_grammar(self) -> GenerationBody:
        given = self.model_dump(mode="json", by_alias=True, include=set(structured.NAMES))
        self._grammar = structured.only_grammar(given)  # once: a schema takes milliseconds to serialize
        return self

    def grammar_of_output(self) -> Grammar | None:
        """Return the grammar that the body demands of the output; None if any text will do."""
        return self._grammar[1]

    def grammar_field(self) -> str | None:
        """Return the name of the field that demands a grammar; None if none does."""
        return self._grammar[0]

    def sampling(self) -> SamplingParams:
        """Return the body's sampling parameters; their seed keeps its default, since each choice has its own."""
        values = {name: getattr(self, name) for name in RANGES if name not in ("seed", "top_k")}
        biases = sorted((int(token_id), bias) for token_id, bias in self.logit_bias.items())
        return SamplingParams(**values, top_k=max(0, self.top_k), logit_bias=tuple(biases))

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    no_ops = noops.COMPLETION
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), WHOLE] | None = Field(
        None, description=f"0, with echo: the prompt alone. Unset: the target's default, or else {DEFAULT_MAX_TOKENS}."
    )
    logprobs: NumLogprobs | None = Field(None, description="With echo, of the prompt's tokens too.")
    echo: bool = False

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo: true; without it the least is 1")
        return self

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Return the list of prompts, each a text or token ids; a body with one prompt gives a list of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [tuple(self.prompt)]
        prompts = cast("list[str | list[int]]", self.prompt)
        return [each if isinstance(each, str) else tuple(each) for each in prompts]


class ChatBody(GenerationBody, TemplateBody):
    """Body of /v1/chat/completions."""

    no_ops = noops.CHAT
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = Field(None, description="Unset: auto.")
    parallel_tool_calls: bool = Field(True, description="Several calls in one answer, where the model writes such.")
    max_tokens: NumTokens | None = Field(None, description="Unset: to the end of the context.")
    keep_alive: float | str | None = Field(None, description="Accepted without effect: models stay loaded.")
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _check_choice(self) -> ChatBody:
        check_choice(self.tools, self.tool_choice)
        return self

    def chat(self) -> Chat:
        """Return the conversation with the tools that may be called.

        Raises:
            InvalidRequestError: a text is not valid UTF-8, or a part of the conversation exceeds its limit.
        """
        return chat_of(self.messages, self.offered(), self.template_kwargs())

    def offered(self) -> list[Tool]:
        """Return the tools that the model may call: none if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else self.tools


class TokenizeBody(TemplateBody):
    """Body of /tokenize, with either a prompt or the messages of a chat."""

    no_ops = noops.TOKENIZE
    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Tools = Field(default_factory=list)
    add_special_tokens: bool = Field(True, description="To a prompt; messages have those of the chat template.")

    @model_validator(mode="after")
    def _check_one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        return self

    def text(self) -> str | Chat:
        """Return the text or conversation to tokenize."""
        return chat_of(self.messages or [], self.tools, self.template_kwargs()) if self.prompt is None else self.prompt


class DetokenizeBody(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True), ALL_WHOLE]
