"""Calls as Hermes and Qwen write them, anywhere: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re

from inference.text.calls.reader import CallReader
from inference.text.held import split_held

BEGIN, END = "<tool_call>", "</tool_call>"
_MARK = re.compile(f"{END}|(?={BEGIN})")


class HermesReader(CallReader):
    """Whitespace around a call is no text; a call that is not closed ends where the next one begins."""

    def _in_text(self) -> bool:
        before, begin, behind = self._buffer.partition(BEGIN)
        if not begin:
            certain, self._buffer = split_held(before, BEGIN)
            self._say(certain)
            return False
        certain = before.rstrip()
        self._say(certain)
        return self._expect(before[len(certain) :] + BEGIN, behind)

    def _behind_call(self) -> bool:
        mark = _MARK.search(self._buffer)
        if mark is None:
            self._buffer = self._buffer[-len(END) :]
            return False
        self._buffer, self._state, self._drops_space = self._buffer[mark.end() :], self._in_text, True
        return True
