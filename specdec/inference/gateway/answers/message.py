"""Reader of a model's text as a message: reasoning, content and calls of tools, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.inference.text.calls.reader import CallPiece, CallReader
from specdec.inference.text.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class Reading:
    """What one piece of text adds to a message: reasoning, content, and pieces of tool calls, by the call's index."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, CallPiece] = field(default_factory=dict)


class MessageReader:
    """Splitter of one answer's text, given piece by piece, into reasoning, content and tool calls.

    The result is the same however the text is cut into pieces.

    Args:
        reasoning: splitter of the reasoning; None if the text has none.
        calls: reader of the tool calls; None if the text has none.
        one_call: True to drop all calls but the first.

    Attributes:
        has_calls: True once a piece of a call has been returned.
    """

    def __init__(self, reasoning: Reasoning | None, calls: CallReader | None, *, one_call: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._one_call = one_call
        self.has_calls = False

    def push(self, text: str, *, is_last: bool, is_cut: bool = False) -> Reading:
        """Return what a piece of text adds to the message.

        Text that may be the beginning of a mark or of a tool call is added only with a later piece that decides it, or
        with the last piece. If `is_cut`, the limit of tokens ended the text: what may be the beginning of a call at its
        end is left out.
        """
        thought, rest = self._reasoning.push(text, is_last=is_last) if self._reasoning else ("", text)
        if self._calls is None:
            return Reading(thought, rest)
        content, calls = self._calls.push(rest, is_last=is_last, is_cut=is_cut)
        if self._one_call:
            calls = {number: call for number, call in calls.items() if number == 0}
        self.has_calls |= bool(calls)
        return Reading(thought, content, calls)
