"""Flags built from the settings of configurations, and configurations built from parsed flags.

The only file of the command line that sees an `argparse.Namespace`.
"""

from __future__ import annotations

import argparse
import enum
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from specdec.inference.errors import ConfigError
from specdec.inference.settings import GROUP, SETTING, Group, Setting, check, described

T = TypeVar("T")

_NOTHING = ("None", "False", "()", "{}", "")
"""Defaults that --help does not show."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Command-line flag of one field of a configuration, as a role declares it.

    Attributes:
        kind: type of the value, or of each value where the flag may be repeated.
        setting: declared setting of the field, with the section of its group.
    """

    kind: Any
    is_repeated: bool
    default: Any
    setting: Setting

    def value(self, args: argparse.Namespace) -> Any:
        """Return the field's value, as parsed flags have it."""
        value = getattr(args, self.setting.key)
        if value is not None and (self.is_repeated or self.is_enum):
            return tuple(value) if self.is_repeated else self.kind(value)
        return value

    @property
    def is_enum(self) -> bool:
        return isinstance(self.kind, type) and issubclass(self.kind, enum.Enum)

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add the flag to a group of argparse."""
        group.add_argument(*self.setting.names, help=self._help(), **self._default(), **self._form())

    def _help(self) -> str:
        """Return the text of --help; the default is appended unless the text has one."""
        text, shown = self.setting.help, str(self.default)
        if "(default" in text or "%(default)s" in text or self.default is MISSING or shown in _NOTHING:
            return text
        return f"{text} (%(default)s s)" if self.setting.metavar == "S" else f"{text} (%(default)s)"

    def _default(self) -> dict[str, Any]:
        if self.default is MISSING:
            return {"required": True} if self.setting.usage.startswith("--") else {}
        if self.is_enum:
            return {"default": self.default.value}
        if self.is_repeated or not isinstance(self.default, tuple):
            return {"default": [] if self.default == () else self.default}
        return {"default": ",".join(str(getattr(each, "value", each)) for each in self.default)}  # read as a flag's is

    def _form(self) -> dict[str, Any]:
        """Return argparse's options for the value: its type, choices, action and metavar."""
        if self.kind is bool:
            return {"action": argparse.BooleanOptionalAction if self.default else "store_true"}
        if self.is_enum:
            return {"choices": [each.value for each in self.kind]}
        metavar, choices = self.setting.metavar, self.setting.choices
        form: dict[str, Any] = {"type": _parser_of(self.kind), "choices": choices, "metavar": metavar}
        if self.is_repeated:
            form["action"] = "append"
        elif self.kind is Mapping:
            form["action"] = _MergeObjects
        if not self.setting.usage.startswith("--") and self.default is not MISSING:
            form["nargs"] = "?"
        if self.setting.bare is not None:
            form |= {"nargs": "?", "const": self.setting.bare}
        return form


class _MergeObjects(argparse.Action):
    """Action that merges JSON objects; later values win, key by key."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), **values})


def _parser_of(kind: Any) -> Callable[[str], Any] | None:
    """Return the function that parses a value, None for plain text."""
    if kind is str:
        return None
    if kind is Path:
        return _path
    if kind is Mapping:
        return _json_object
    if not hasattr(kind, "parse"):
        return kind  # type: ignore[no-any-return]

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _path(text: str) -> Path:
    """Return a path. Path drops a leading `./`, which is kept here, so that the path is not taken for a hub id."""
    return Path(text).absolute() if text.startswith("./") else Path(text)


def _json_object(text: str) -> dict[str, Any]:
    """Return a JSON object; dashes in names become underscores, as in flags."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return {name.replace("-", "_"): each for name, each in value.items()}


def add_group(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add the flags of a configuration and of all groups within it, section by section.

    A flag that two groups declare is added once, in the section of the last of them.
    """
    flags: dict[str, Flag] = {}
    for flag in _flags(_whole(kind)):
        flags.pop(flag.setting.key, None)
        flags[flag.setting.key] = flag
    for title in dict.fromkeys(flag.setting.section for flag in flags.values()):
        section = parser.add_argument_group(title)
        members = [flag for flag in flags.values() if flag.setting.section == title]
        one_of = section.add_mutually_exclusive_group() if any(flag.setting.exclusive for flag in members) else section
        for flag in members:
            flag.add_to(one_of if flag.setting.exclusive else section)


def read(kind: type[T], args: argparse.Namespace) -> T:
    """Return the configuration that parsed flags describe.

    Raises:
        ConfigError: a value is out of range, or conflicts with another one.
        InvalidRequestError: a parameter of a request is out of range.
    """
    return _read(_whole(kind), args)  # type: ignore[no-any-return]


def _read(group: Group, args: argparse.Namespace) -> Any:
    if group.needs and all(getattr(args, key) is None for key in group.needs):
        for flag in _flags(group):
            flag.setting.check(flag.setting.key, flag.value(args))
        return None
    values = {name: _value(part, args) for name, part in _parts(group)}
    made = group.kind(**values)
    check(made)
    return made


def _value(part: Any, args: argparse.Namespace) -> Any:
    if isinstance(part, Group):
        return _read(part, args)
    return part.value(args) if isinstance(part, Flag) else part


def _whole(kind: type[Any]) -> Group:
    return Group(kind, getattr(kind, "SECTION", None))


def _flags(group: Group) -> Iterator[Flag]:
    for _, part in _parts(group):
        if isinstance(part, Group):
            yield from _flags(part)
        elif isinstance(part, Flag):
            yield part


def _parts(group: Group) -> Iterator[tuple[str, Any]]:
    """Yield each field's name with its `Flag`, its `Group` or the value that a role fixes."""
    hints = get_type_hints(group.kind)
    for each in fields(group.kind):
        change = group.changes.get(each.name, each)
        declared = change if isinstance(change, Field) else each
        setting = described(group.kind, each.name, declared) if SETTING in declared.metadata else Setting()
        if GROUP in declared.metadata:
            yield each.name, _inner(declared.metadata[GROUP], group)
        elif setting.usage and setting.key not in group.without:
            default = _default_of(declared) if isinstance(change, Field) else change
            setting = replace(setting, section=setting.section or group.section)
            kind = (setting.kind, False) if setting.kind else _kind(hints[each.name])
            yield each.name, Flag(*kind, default, setting)
        elif change is not each:
            yield each.name, change


def _inner(inner: Group, outer: Group) -> Group:
    section = inner.section or _whole(inner.kind).section or outer.section
    return replace(inner, section=section, without=inner.without | outer.without)


def _default_of(declared: Field[Any]) -> Any:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of a flag's value, without None; and whether the flag takes several values."""
    if NoneType in get_args(hint):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return get_origin(hint) or hint, False
