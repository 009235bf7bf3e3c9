"""Flags for `argparse`, made of the settings that configurations declare (inference/settings.py)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import wraps
from typing import Any

from specdec.inference.declared import Declared, declared
from specdec.inference.errors import ConfigError

_NOTHING = ("None", "False", "()", "{}", "")
"""Defaults that --help does not show."""


def add_group(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add the flags of a configuration, and of all configurations within it, to a parser, section by section.

    A flag that two of them declare is added once, in the section of the last one.

    Args:
        kind: class of the configuration, a dataclass.
    """
    flags: dict[str, Declared] = {}
    for flag in declared(kind):
        flags.pop(flag.setting.key, None)
        flags[flag.setting.key] = flag
    for title in dict.fromkeys(flag.setting.section for flag in flags.values()):
        section = parser.add_argument_group(title)
        members = [flag for flag in flags.values() if flag.setting.section == title]
        one_of = section.add_mutually_exclusive_group() if any(flag.setting.exclusive for flag in members) else section
        for flag in members:
            group: argparse._ActionsContainer = one_of if flag.setting.exclusive else section
            group.add_argument(*flag.setting.names, help=_help(flag), **_default(flag), **_form(flag))


def _help(flag: Declared) -> str:
    """Return a flag's help, with its default at the end, unless the text has it or it is one of `_NOTHING`."""
    text, shown = flag.setting.help, str(flag.default)
    if "(default" in text or "%(default)s" in text or flag.default is MISSING or shown in _NOTHING:
        return text
    return f"{text} (%(default)s s)" if flag.setting.metavar == "S" else f"{text} (%(default)s)"


def _default(flag: Declared) -> dict[str, Any]:
    if flag.default is MISSING:
        return {"required": True} if flag.setting.usage.startswith("--") else {}
    return {"default": flag.typed_default}


def _form(flag: Declared) -> dict[str, Any]:
    """Return `add_argument`'s options for a flag's value: its type, choices, action and metavar."""
    if flag.kind is bool:
        return {"action": argparse.BooleanOptionalAction if flag.default else "store_true"}
    if flag.is_enum:
        return {"choices": [each.value for each in flag.kind]}
    metavar, choices = flag.setting.metavar, flag.setting.choices
    form: dict[str, Any] = {"type": _typed(flag.parse), "choices": choices, "metavar": metavar}
    if flag.is_repeated:
        form["action"] = "append"
    elif flag.kind is Mapping:
        form["action"] = _MergeObjects
    if not flag.setting.usage.startswith("--") and flag.default is not MISSING:
        form["nargs"] = "?"
    if flag.setting.bare is not None:
        form |= {"nargs": "?", "const": flag.setting.bare}
    return form


def _typed(parse: Callable[[str], Any] | None) -> Callable[[str], Any] | None:
    """Return a function that parses a value like `parse`, with errors that argparse shows.

    None and types are returned unchanged; argparse's own message names a type.
    """
    if parse is None or isinstance(parse, type):
        return parse

    @wraps(parse)  # argparse names it
    def read_text(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_text


class _MergeObjects(argparse.Action):
    """Argparse's action for a flag with JSON objects, which may be repeated: they are merged, and later values win."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), **values})
