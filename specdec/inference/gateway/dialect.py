"""How the served model writes what is not plain text: the format of its tool calls, and marks around its reasoning."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.inference.config import HttpConfig
from specdec.inference.errors import InvalidRequestError
from specdec.inference.gateway.answers.errors import ApiError
from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.gateway.bodies.conversation import NamedTool, Tool
from specdec.inference.gateway.bodies.schema import ChatBody
from specdec.inference.request import Grammar, GrammarKind, Preamble
from specdec.inference.text.calls.formats import FORMATS, CallFormat
from specdec.inference.text.calls.grammar import calls_anywhere, only_calls
from specdec.inference.text.reasoning import BEGIN, Reasoning, is_begun
from specdec.inference.workers.completion import ModelCard


@dataclass(frozen=True, slots=True)
class Dialect:
    """Form in which a model writes tool calls and reasoning.

    Attributes:
        calls: format of the model's tool calls; None if it is none of the formats that this project can read.
        thinks: True if the model may reason before it answers, and marks its reasoning.
        knows_effort: True if its chat template has a variable for the effort of reasoning.
    """

    calls: CallFormat | None
    thinks: bool
    knows_effort: bool

    @classmethod
    def of(cls, card: ModelCard, config: HttpConfig) -> Dialect:
        """Return the dialect of the model that `card` describes.

        It follows from the model's chat template, except that the settings tool_call_parser and reasoning_parser decide
        if they are not "auto".
        """
        parser, thinking = config.tool_call_parser, config.reasoning_parser
        calls = FORMATS.get(card.call_format or "" if parser == "auto" else parser)
        thinks = BEGIN in (card.chat_template or "") if thinking == "auto" else thinking == "think"
        return cls(calls, thinks, "reasoning_effort" in (card.chat_template or ""))

    def check(self, body: ChatBody) -> None:
        """Refuse a request with tools, or with an effort of reasoning, if the model's chat template has no form for it.

        Raises:
            ApiError: the request has one of these; the message says what to do instead.
        """
        if body.reasoning_effort not in (None, "medium") and not self.knows_effort:
            fault = (
                f"the model's chat template knows no effort, {body.reasoning_effort} would change nothing; leave it out"
            )
            raise ApiError(400, f"reasoning_effort: {fault}", param="reasoning_effort", code="unsupported_parameter")
        if body.offered() and self.calls is None:
            known = " or ".join(FORMATS)
            fault = f"the model's chat template writes calls in no known form; name one by --tool_call_parser {known}"
            raise ApiError(400, f"tools: {fault}", param="tools", code="unsupported_parameter")

    def grammar(self, body: ChatBody) -> Grammar | None:
        """Return the grammar that a request's tools and response format demand of the output; None if any text will do.

        The grammar begins after the reasoning, if the model reasons.

        Raises:
            InvalidRequestError: the tools are too long for a grammar, or cannot be combined with the response format.
        """
        offered = body.offered()
        try:
            grammar = self._of_tools(body, offered, self.calls) if offered and self.calls else body.grammar_of_output()
        except (ValueError, InvalidRequestError) as exc:
            raise InvalidRequestError(f"tools: {exc}", field=body.grammar_field() or "tools") from exc
        if grammar is None or not self.thinks:
            return grammar
        return replace(grammar, preamble=Preamble.REASONING)

    def _of_tools(self, body: ChatBody, offered: list[Tool], calls: CallFormat) -> Grammar | None:
        functions, output = {tool.function.name: tool.function.arguments for tool in offered}, body.grammar_of_output()
        many = body.parallel_tool_calls
        if isinstance(choice := body.tool_choice, NamedTool):
            named = {choice.function.name: functions[choice.function.name]}
            return only_calls(calls, named, many=False, output=None)
        if choice == "required":
            return only_calls(calls, functions, many=many, output=None)
        if output is not None and output.kind is not GrammarKind.JSON_SCHEMA:
            raise ValueError("with calls that the model may or may not make, only JSON can be asked for")
        if output is not None:
            return only_calls(calls, functions, many=many, output=output)
        if calls.trigger is not None and any(tool.function.strict for tool in offered):
            return calls_anywhere(calls, functions)
        return None

    def reader(self, body: ChatBody, prompt: str) -> MessageReader | None:
        """Return the reader that splits the text of one answer into reasoning, content and tool calls.

        Return None if the answer can only be content. The end of `prompt` shows whether the answer begins inside
        reasoning.
        """
        names = frozenset(tool.function.name for tool in body.offered())
        calls = self.calls.reader(names) if self.calls and names else None
        if calls is None and not self.thinks:
            return None
        thoughts = Reasoning(begun=is_begun(prompt)) if self.thinks else None
        return MessageReader(thoughts, calls, one_call=not body.parallel_tool_calls)
