"""Reads a model's text as a message: reasoning, content and calls of tools, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.text.calls.reader import CallPiece, CallReader, Piece
from inference.text.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class Reading:
    """What a piece of text adds to a message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class AnswerReader:
    """Reads one answer; how its text is cut into pieces changes nothing of the whole.

    Args:
        reasoning: splits it off; None: there is none.
        calls: finds them; None: there are none.
        one_call: further ones are dropped.
    """

    def __init__(self, reasoning: Reasoning | None, calls: CallReader | None, *, one_call: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._one_call = one_call
        self.has_calls = False

    def push(self, text: str, *, is_last: bool) -> Reading:
        """What a piece of the text adds; with the last one also what was held back."""
        thought, rest = self._reasoning.push(text) if self._reasoning else ("", text)
        if is_last and self._reasoning:
            held = self._reasoning.rest()
            thought, rest = thought + held[0], rest + held[1]
        if self._calls is None:
            return Reading(thought, rest)
        pieces = self._calls.push(rest) + (self._calls.rest() if is_last else [])
        return Reading(thought, "".join(each for each in pieces if isinstance(each, str)), self._merged(pieces))

    def _merged(self, pieces: Sequence[Piece]) -> tuple[CallPiece, ...]:
        """One piece per call."""
        calls: dict[int, CallPiece] = {}
        for piece in pieces:
            if isinstance(piece, CallPiece) and not (self._one_call and piece.index):
                before = calls.get(piece.index, CallPiece(piece.index, "", piece.name))
                calls[piece.index] = CallPiece(piece.index, before.arguments + piece.arguments, before.name)
        self.has_calls |= bool(calls)
        return tuple(calls.values())
