"""Declaration of settings: each field of a configuration has its flag, help, unit, range, choices and default in it.

`setting` declares a field, and `group` a configuration within a larger one. Knows nothing of argparse:
`inference/cli/flags.py` makes flags of the declarations, and `inference/declared.py` configurations of their values.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from specdec.inference.errors import ConfigError

T = TypeVar("T")

REQUIRED: Any = MISSING
"""Mark, in place of a default, of a setting that must be given."""
FINITE = sys.float_info.max
"""Upper end for a range that excludes only infinity."""


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a number.

    Attributes:
        low, high: ends of the range.
        above: True if `low` itself is outside.
    """

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low, high = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.low, self.high))
        if isinstance(self.low, int) or (self.low == 0 and self.high > 1 and not self.above):
            return f"{low}..{high}"  # as counts are written
        return f"{'(' if self.above else '['}{low}, {high}]"

    def fault(self, value: float) -> str:
        """Return a predicate about a value outside the range, for a message, such as "is below 1"."""
        if self.high < FINITE:
            return f"is outside {self}"
        if value == math.inf:
            return "is not finite"
        return f"is {'not above' if self.above else 'below'} {self.low:g}"


@dataclass(frozen=True, slots=True)
class Setting:
    """Declaration of a field: its flag, and the values that it may have.

    Attributes:
        usage: flag as it is typed, with its aliases and its unit: "--gamma --speculation_length N". Without dashes,
            the value is positional; empty: the field has no flag.
        help: text of --help; empty: the text of the field in the Attributes section of its class.
        choices: texts that the value may be; None: any.
        within: range that the value must be in; None: any.
        section: title above the flag in --help; None: its group's.
        exclusive: True if at most one of the section's exclusive flags can be given.
        bare: value of the flag when it is given without one.
        kind: type or parser of the value; None: the type of the field.
    """

    usage: str = ""
    help: str = ""
    choices: tuple[str, ...] | None = None
    within: Range | None = None
    section: str | None = None
    exclusive: bool = False
    bare: object = None
    kind: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the flag with its aliases, or the name of a positional value."""
        words = self.usage.split()
        return tuple(word for word in words if word.startswith("--")) or tuple(words)

    @property
    def key(self) -> str:
        """Return the name of the parsed value, and of the key in --config files: the flag's name without dashes."""
        return self.names[0].removeprefix("--")

    @property
    def metavar(self) -> str | None:
        """Return the word for the value that --help shows, such as its unit; None if there is none."""
        return self.usage.removeprefix(" ".join(self.names)).strip() or None

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError if the field `name` has a value out of range or not among the choices; None is valid."""
        if value is None:
            return
        shown = self.key if self.usage else name
        for each in value if isinstance(value, tuple) else (value,):
            if self.within is not None and each not in self.within:
                raise ConfigError(f"{shown} {each} {self.within.fault(each)}")
        if self.choices is not None and isinstance(value, str) and value not in self.choices:
            raise ConfigError(f"{shown} {value} is none of {', '.join(self.choices)}")


@dataclass(frozen=True, slots=True)
class Group:
    """Declaration of a field that is a configuration within a larger one.

    Attributes:
        kind: dataclass of the configuration.
        section: title above its flags in --help, except for settings with their own.
        without: flags that are left out, by their first name; these fields keep their defaults.
        needs: flags of which at least one must be given, or the field is None instead of a configuration.
        changes: by field name, another default, or another `setting` or `group`.
    """

    kind: type[Any]
    section: str | None = None
    without: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


SETTING, GROUP = "setting", "group"
"""Keys under which a field's metadata has its `Setting` or its `Group`."""


def setting(default: T, usage: str = "", **attributes: Any) -> T:
    """Return a dataclass field with a `Setting`; the arguments are the field's default and those of `Setting`."""
    metadata = {SETTING: Setting(usage, **attributes)}
    if isinstance(default, dict):
        return cast(T, field(default_factory=default.copy, hash=False, metadata=metadata))
    return field(default=default, metadata=metadata)


def same(kind: type[Any], name: str, **changes: Any) -> Any:
    """Return a dataclass field with setting and default of the field `name` of `kind`, except for `changes`.

    These are attributes of `Setting`, and `default`.
    """
    other = field_of(kind, name)
    default = changes.pop("default", other.default)
    return field(default=default, metadata={SETTING: replace(described(kind, name, other), **changes)})


def described(kind: type[Any], name: str, declared: Field[Any]) -> Setting:
    """Return the setting of the field `name` of the dataclass `kind`, with a text for --help.

    If the setting has no text of its own, it gets the one from the Attributes section of the class's docstring.

    Args:
        kind: the dataclass.
        name: name of the field.
        declared: the field, or another one with a `Setting` that is used instead.
    """
    found = cast(Setting, declared.metadata[SETTING])
    return found if found.help else replace(found, help=_attributes(kind).get(name, ""))


def _attributes(kind: type[Any]) -> dict[str, str]:
    """Return the text about each attribute in the Attributes sections of the docstrings of a class and its bases."""
    docs = (inspect.cleandoc(base.__doc__ or "") for base in reversed(kind.__mro__))
    texts = (doc.partition("Attributes:\n")[2].partition("\n\n")[0] for doc in docs)
    entries = (entry for text in texts for entry in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE))
    return {name: re.sub(r"\s+", " ", text).removesuffix(".") for name, text in entries}


def group(
    kind: type[T],
    section: str | None = None,
    *,
    without: Collection[str] = (),
    needs: tuple[str, ...] = (),
    **changes: Any,
) -> T:
    """Return a dataclass field that is a configuration; the arguments are those of `Group`.

    Its `changes` are keyword arguments, by field name.
    """
    for name in changes:
        field_of(kind, name)
    metadata = {GROUP: Group(kind, section, frozenset(without), needs, changes)}
    return field(default_factory=kind, metadata=metadata)


def field_of(kind: type[Any], name: str) -> Field[Any]:
    """Return the field of a dataclass by its name; KeyError if there is none."""
    return {each.name: each for each in fields(kind)}[name]


def check(config: Any) -> None:
    """Raise ConfigError if any setting of a configuration has a value out of range or not among its choices."""
    for each in fields(config):
        if SETTING in each.metadata:
            each.metadata[SETTING].check(each.name, getattr(config, each.name))


class Checked:
    """Base class of configurations that are checked when they are made; see `check`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)
