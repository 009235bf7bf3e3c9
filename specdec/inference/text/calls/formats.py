"""Formats in which models write calls of tools, and the search for the format that a chat template uses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.inference.text.calls.reader import CallReader
from specdec.inference.text.held import split_held

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_MARK = re.compile(f"{TOOL_CALL_END}|(?={TOOL_CALL})")
PYTHON_TAG = "<|python_tag|>"
_CALL_END = re.compile(r"\s*\}?\s*(;?)")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Form in which a model writes a tool call: `before`, then {"name": ..., `key`: {...}}, then `after`.

    Attributes:
        reader: class that reads calls of this format in a growing text.
        key: name of the JSON field that holds the arguments.
        between: text between two calls; None if an answer has at most one call.
        trigger: text that begins a call wherever it occurs; None if the format has no such text.
        opening: marker that may stand before the first call; None if there is none.
    """

    reader: type[CallReader]
    before: str
    key: str
    after: str
    between: str | None
    trigger: str | None
    opening: str | None = None

    def written(self, call: Mapping[str, Any]) -> str:
        """Return the text of a call from an earlier message, as the model would write it.

        Args:
            call: entry of "tool_calls" as in OpenAI's API, but with the arguments as an object, not as its JSON text.
        """
        function = call["function"]
        body = json.dumps({"name": function.get("name"), self.key: function.get("arguments")}, ensure_ascii=False)
        return f"{self.before}{body}{self.after}"


class HermesReader(CallReader):
    """Reader of calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    Calls may stand anywhere in the text. Whitespace around a call is dropped. An unclosed call ends where the next one
    begins.
    """

    def _in_text(self) -> bool:
        before, begin, rest = self._buffer.partition(TOOL_CALL)
        if not begin:
            certain, self._buffer = split_held(before, TOOL_CALL)
            self._emit(certain)
            return False
        certain = before.rstrip()
        self._emit(certain)
        return self._expect(before[len(certain) :] + TOOL_CALL, rest)

    def _after_call(self) -> bool:
        mark = _MARK.search(self._buffer)
        if mark is None:
            self._buffer = self._buffer[-len(TOOL_CALL_END) :]
            return False
        self._buffer, self._state, self._drops_space = self._buffer[mark.end() :], self._in_text, True
        return True


class Llama3JsonReader(CallReader):
    """Reader of Llama 3's calls: the whole text is {"name": ..., "parameters": {...}}, maybe after <|python_tag|>.

    Several calls are separated by semicolons. Only a text that begins with a call has calls, since any other text may
    hold JSON.
    """

    def _in_text(self) -> bool:
        text = self._buffer.lstrip()
        if self._num_calls == 0 and not self._opening:
            if text.startswith(PYTHON_TAG):
                return self._expect(PYTHON_TAG, text.removeprefix(PYTHON_TAG))
            if text.startswith("{"):
                return self._expect(self._buffer[: -len(text)], text)
            if PYTHON_TAG.startswith(text):
                return False
        return self._only_text()

    def _only_text(self) -> bool:
        self._emit(self._buffer)
        self._buffer, self._state = "", self._only_text
        return False

    def _no_call(self) -> bool:
        self._emit(self._opening)
        self._state = self._only_text
        return True

    def _after_call(self) -> bool:
        rest = _CALL_END.match(self._buffer)
        if rest is None or (rest.end() == len(self._buffer) and not rest[1]):
            return False
        self._drops_space = True
        if rest[1]:
            return self._expect(";", self._buffer[rest.end() :])
        self._buffer, self._state = self._buffer[rest.end() :], self._only_text
        return True


HERMES = CallFormat(HermesReader, f"{TOOL_CALL}\n", "arguments", f"\n{TOOL_CALL_END}", between="\n", trigger=TOOL_CALL)
LLAMA3_JSON = CallFormat(Llama3JsonReader, "", "parameters", "", between=None, trigger=None, opening=PYTHON_TAG)
FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
MARKERS = (TOOL_CALL, TOOL_CALL_END, PYTHON_TAG)
"""Markers of tool calls in all formats. A marker may be a special token of the model, which decoding leaves out; then
the token's name has to be written in its place."""
_PROBE = "probe"
_ASKED: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": "Please."},)
_CALL: Mapping[str, Any] = {"name": _PROBE, "arguments": {"place": "Oslo"}}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "callprobe", "type": "function", "function": _CALL}],  # Mistral's ids have nine characters
}
_PROPERTIES = {"place": {"type": "string", "description": "A place."}}
_TOOL = {
    "name": _PROBE,
    "description": "A probe.",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["place"]},
}


def shown_format(render: Callable[..., str] | None) -> str:
    """Return the name of the format in which a chat template writes tool calls; empty if it is none of `FORMATS`.

    Args:
        render: function that writes messages by the template, with keyword arguments `tools` and
            `add_generation_prompt`; None for a model without a template, for which calls are written as for Hermes.
    """
    if render is None:
        return "hermes"
    tools = [{"type": "function", "function": _TOOL}]
    try:
        whole = render([*_ASKED, _CALLED], tools=tools, add_generation_prompt=False)
        prompts = [render([*_ASKED], tools=tools, add_generation_prompt=each) for each in (True, False)]
    except Exception:  # whatever a template raises that knows no tools
        return ""
    written = next((whole.removeprefix(each) for each in prompts if whole.startswith(each)), "")
    return next((name for name, form in FORMATS.items() if _shows_call(written, form)), "")


def _shows_call(text: str, form: CallFormat) -> bool:
    _, calls = form.reader(frozenset([_PROBE])).push(text, is_last=True)
    found = [(each.name, each.arguments) for each in calls.values()]
    return found == [(_PROBE, json.dumps(_CALL["arguments"]))] and f'"{form.key}"' in text
