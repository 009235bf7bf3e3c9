"""Reader of calls of tools in a growing text; text that only looks like a call stays text.

A call is a JSON object with the name of an offered function, and with arguments, which are an object too. Text is held
back until it is certain that it is a call or is not; then a call's arguments are passed on as they come. So the result
does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_HEAD_CHARACTERS = 4096
"""Most characters held back to find out whether they begin a call; usually a few dozen show it."""
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII)
_KEYS = "name|arguments|parameters|type|id"
_NO_CALL = re.compile(rf'\s*(?:[^{{\s]|\{{\s*(?:[^"\s]|"(?!(?:{_KEYS})")[^"]*"))')


@dataclass(slots=True)
class CallPiece:
    """Piece of a call: of its arguments' JSON text, and in the call's first piece the function's name, else None."""

    name: str | None = None
    arguments: str = ""


Pieces: TypeAlias = tuple[str, dict[int, CallPiece]]
"""Text outside of calls, and the new pieces of calls, by the numbers of these calls in the answer."""


class JsonEnd:
    """Finder of the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Return how many characters of the next piece of text belong to the object; None if it does not end there.

        A "<" outside of strings, which no JSON has, ends the object too.
        """
        for i, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._is_escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
            elif character == "<":
                return i
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


class CallReader:
    """Reader of calls in one answer; a subclass for each format defines what introduces a call, and what follows it.

    Args:
        names: names of the offered functions.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = self._opening = ""
        self._num_scanned = self._num_calls = 0
        self._end = JsonEnd()
        self._drops_space = False  # after a call
        self._text = ""
        self._calls: dict[int, CallPiece] = {}
        self._state: Callable[[], bool] = self._in_text

    def push(self, text: str, *, is_last: bool, is_cut: bool = False) -> Pieces:
        """Add a piece of the answer's text; return the new text outside of tool calls, and the new pieces of calls.

        Text that may be the beginning of a call is returned only by a later call of this method, which decides it, or
        if `is_last`. If `is_cut`, the limit of tokens ended the answer: what may begin a call at its end is left out.
        """
        self._buffer += text
        while self._state():
            pass
        if is_last and self._state in (self._in_head, self._in_text) and not (is_cut and self._may_begin_call()):
            self._emit((self._opening if self._state == self._in_head else "") + self._buffer)
        pieces, self._text, self._calls = (self._text, self._calls), "", {}
        return pieces

    def _may_begin_call(self) -> bool:
        return self._state == self._in_head or self._num_calls > 0

    def _in_text(self) -> bool:
        """Look for the beginning of a tool call in the text read so far.

        Return True if the state has changed, so that its method must read on; False if more text is needed.
        """
        raise NotImplementedError

    def _after_call(self) -> bool:
        """Skip the rest of a tool call behind its arguments; return True when done, False if more text is needed."""
        raise NotImplementedError

    def _no_call(self) -> bool:
        """Treat as text what looked like a tool call, and look for the next one; return True: the state has changed."""
        self._emit(self._opening)
        self._state = self._in_text
        return True

    def _emit(self, text: str) -> None:
        if self._drops_space:
            text = text.lstrip()
        if text:
            self._drops_space = False
            self._text += text

    def _expect(self, opening: str, rest: str) -> bool:
        """Begin to read what may be a call: `opening` was found in the text, and `rest` follows it; return True."""
        self._opening, self._buffer, self._num_scanned = opening, rest, 0
        self._end, self._state = JsonEnd(), self._in_head
        return True

    def _in_head(self) -> bool:
        if head := _HEAD.match(self._buffer, 0, MAX_HEAD_CHARACTERS):
            return self._begin(head[1], head.end()) if head[1] in self._names else self._no_call()
        if _NO_CALL.match(self._buffer):
            return self._no_call()
        end = self._end.end_in(self._buffer[self._num_scanned : MAX_HEAD_CHARACTERS])
        if end is None:
            self._num_scanned = min(len(self._buffer), MAX_HEAD_CHARACTERS)
            return self._no_call() if self._num_scanned == MAX_HEAD_CHARACTERS else False
        return self._take_whole(self._num_scanned + end)

    def _begin(self, name: str, length: int) -> bool:
        self._calls[self._num_calls] = CallPiece(name)
        self._num_calls += 1
        self._buffer, self._end, self._state = self._buffer[length:], JsonEnd(), self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        end = self._end.end_in(self._buffer)
        piece = self._buffer[:end]
        if piece:
            self._calls.setdefault(self._num_calls - 1, CallPiece()).arguments += piece
        self._buffer = self._buffer[len(piece) :]
        if end is None:
            return False
        self._state = self._after_call
        return True

    def _take_whole(self, end: int) -> bool:
        """Read a call's JSON object, which ends at index `end` of the text, if its fields are in an unusual order.

        Such an order is, for example, the arguments first. An object that is no call of an offered function becomes
        text. Return True: another state of the reader must read on.
        """
        call = _call_of(self._buffer[:end], self._names)
        if call is None:
            return self._no_call()
        self._calls[self._num_calls] = CallPiece(*call)
        self._num_calls += 1
        self._buffer, self._state = self._buffer[end:], self._after_call
        return True


def _call_of(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Return the function's name, and the arguments as JSON text, from a call's JSON object.

    Return None if the text is not a call of one of the functions `names`.
    """
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = call.get("arguments", call.get("parameters")) or {}
    name = call.get("name")
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
