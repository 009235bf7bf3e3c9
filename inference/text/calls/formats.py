"""The ways in which models write calls, and which one a chat template means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.text.calls import hermes, llama3_json
from inference.text.calls.reader import CallReader


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write a call: before, {"name": ..., key: {...}}, after.

    Attributes:
        between: what separates calls; None: there is one at most.
        trigger: begins a call wherever it stands in a text; None: nothing does that surely.
    """

    reader: type[CallReader]
    before: str
    key: str
    after: str
    between: str | None
    trigger: str | None

    def written(self, call: Mapping[str, Any]) -> str:
        """A call of a conversation, as the model would have written it."""
        function = call["function"]
        body = json.dumps({"name": function.get("name"), self.key: function.get("arguments")}, ensure_ascii=False)
        return f"{self.before}{body}{self.after}"


HERMES = CallFormat(
    hermes.HermesReader, f"{hermes.BEGIN}\n", "arguments", f"\n{hermes.END}", between="\n", trigger=hermes.BEGIN
)
LLAMA3_JSON = CallFormat(llama3_json.Llama3JsonReader, "", "parameters", "", between=None, trigger=None)
FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
MARKERS = (hermes.BEGIN, hermes.END, llama3_json.BEGIN)
"""Of all ways; a tokenizer may have special tokens for them, which otherwise have no text."""
_OTHERS = ("<function=", "<arg_key>")  # other ways to fill a <tool_call>


def format_of(chat_template: str | None) -> CallFormat | None:
    """The way that a template shows the model; None if it is none of these. Without any template it is Hermes'."""
    if chat_template is None:
        return HERMES
    if hermes.BEGIN in chat_template:
        return None if any(each in chat_template for each in _OTHERS) else HERMES
    return LLAMA3_JSON if "tools" in chat_template and '"parameters' in chat_template.replace("\\", "") else None
