"""Readers of prompt files: plain text, chats in JSONL, ShareGPT's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from specdec.inference.cli.prompts.source import read_prompts
from specdec.inference.errors import ConfigError

_USERS = ("human", "user")
"""Roles of the user in ShareGPT's and in OpenAI's format."""
_READ = (*_USERS, "system")
"""Roles of messages that are sent; other messages are ignored."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a user, sent in turn, each with all messages before it and the answers that the server gave to them.

    Attributes:
        turns: messages of the user, at least one.
        system: system message before the turns; empty if there is none.
    """

    turns: tuple[str, ...]
    system: str = ""


Prompt: TypeAlias = "str | Conversation"


def read_dataset(file: Path) -> tuple[Prompt, ...]:
    """Return the prompts of a file.

    The file's ending decides on its format: .jsonl for chats, .json for ShareGPT, any other for one prompt per line.

    Raises:
        ConfigError: the file cannot be used; the message names the place.
    """
    if file.suffix not in (".json", ".jsonl"):
        return tuple(read_prompts(None, file))
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"dataset {file} cannot be read: {exc}") from exc
    found = tuple(_of_lines(file, text) if file.suffix == ".jsonl" else _of_sharegpt(file, text))
    if not found:
        raise ConfigError(f"dataset {file} has no prompt")
    return found


def _of_lines(file: Path, text: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            entry = _object(_json(line, where), where)
            prompt = entry.get("prompt")
            yield _text(prompt, where) if prompt is not None else _conversation(entry, "messages", where)


def _of_sharegpt(file: Path, text: str) -> Iterator[Prompt]:
    """Yield the conversations of a file in ShareGPT's format; those without a message of a user are left out.

    Raises:
        ConfigError: the text is not in this format.
    """
    entries = _json(text, str(file))
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: ShareGPT's list of conversations is expected")
    for number, entry in enumerate(entries, start=1):
        where = f"{file}, conversation {number}"
        conversation = _conversation(_object(entry, where), "conversations", where, may_be_empty=True)
        if conversation.turns:
            yield conversation


def _conversation(entry: dict[str, Any], key: str, where: str, *, may_be_empty: bool = False) -> Conversation:
    """Return the conversation that an entry of a file describes, without its answers.

    Args:
        entry: entry with messages in OpenAI's format (role, content) or in ShareGPT's (from, value).
        key: name of the entry's field that has the list of messages.
        where: place of the entry, for error messages.
        may_be_empty: whether a conversation without a message of the user is returned, and not refused.

    Raises:
        ConfigError: the entry is in neither format, or has no message of the user.
    """
    messages = entry.get(key)
    if not isinstance(messages, list):
        raise ConfigError(f'{where}: a list "{key}" is expected')
    texts: dict[str, list[str]] = {role: [] for role in _READ}
    for index, each in enumerate(messages):
        place = f"{where}, {key}[{index}]"
        message = _object(each, place)
        role, text = str(message.get("role", message.get("from"))), message.get("content", message.get("value"))
        if role in _READ and not (may_be_empty and text == ""):  # public copies of ShareGPT have such messages
            texts[role].append(_text(text, place))
    turns = tuple(text for role in _USERS for text in texts[role])
    if not turns and not may_be_empty:
        raise ConfigError(f'{where}: no message is of "user"')
    return Conversation(turns, "\n".join(texts["system"]))


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{where}: not valid JSON ({exc})") from exc


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a JSON object is expected")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: a text that is not empty is expected")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise ConfigError(f"{where}: character {error.start} is not valid UTF-8") from error
    return value
