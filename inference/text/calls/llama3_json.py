"""Calls as Llama 3 writes them: the whole text is {"name": ..., "parameters": {...}}, maybe behind <|python_tag|>.

Several are separated by semicolons.
"""

from __future__ import annotations

import re

from inference.text.calls.reader import CallReader

BEGIN = "<|python_tag|>"
_BEHIND = re.compile(r"\s*\}?\s*(;?)")


class Llama3JsonReader(CallReader):
    """Only a text that begins with a call has calls: other models' text may well hold JSON."""

    def _in_text(self) -> bool:
        text = self._buffer.lstrip()
        if self._num_calls == 0 and not self._opening:
            if text.startswith(BEGIN):
                return self._expect(BEGIN, text.removeprefix(BEGIN))
            if text.startswith("{"):
                return self._expect(self._buffer[: -len(text)], text)
            if BEGIN.startswith(text):
                return False
        return self._only_text()

    def _only_text(self) -> bool:
        self._say(self._buffer)
        self._buffer, self._state = "", self._only_text
        return False

    def _no_call(self) -> bool:
        self._say(self._opening)
        self._state = self._only_text
        return True

    def _behind_call(self) -> bool:
        behind = _BEHIND.match(self._buffer)
        if behind is None or (behind.end() == len(self._buffer) and not behind[1]):
            return False
        self._drops_space = True
        if behind[1]:
            return self._expect(";", self._buffer[behind.end() :])
        self._buffer, self._state = self._buffer[behind.end() :], self._only_text
        return True
