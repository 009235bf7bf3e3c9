"""Settings that the fields of a configuration (a dataclass) declare, and the making of configurations from values.

The values are given by the names of flags. Both the command line and the library read their settings with this module,
which knows nothing of argparse.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from specdec.inference.errors import ConfigError
from specdec.inference.settings import GROUP, SETTING, Group, Setting, check, described

T = TypeVar("T")

ELSEWHERE = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "num_speculative_tokens": "gamma",
    "do_sample": "temperature",
    "max_model_len": "sequence_length",
    "max_seq_len": "sequence_length",
    "max_num_seqs": "batch",
    "model": "target_model",
    "speculative_model": "draft_model",
    "num_threads": "threads",
    "quantization": "dtype",
    "serve": "fused_target",
    "server": "fused_target",
    "run": "verify_fused",
    "generate": "verify_fused",
    "client": "fused_client",
    "bench": "compare",
    "benchmark": "compare",
    "check": "doctor",
}
"""Names that other programs give to a flag or command, each with this program's name for the same thing."""
EXPECTED = {bool: "True or False", int: "a whole number", float: "a number"}
"""Words for the values of a plain type, for messages."""


@dataclass(frozen=True, slots=True)
class Declared:
    """Setting that a field of a configuration (a dataclass) declares: what a flag or keyword argument of it needs.

    Attributes:
        kind: type of the value, or of each value if there may be several.
        is_repeated: True if there may be several values, so that the flag may be given several times.
        default: value of the field if none is given.
        setting: declaration of the field, which has the section of --help that the flag belongs to.
    """

    kind: Any
    is_repeated: bool
    default: Any
    setting: Setting

    def value(self, values: Mapping[str, Any]) -> Any:
        """Return the field's value, made from the parsed value that `values` has under the name of the flag."""
        value = values[self.setting.key]
        if value is not None and (self.is_repeated or self.is_enum):
            return tuple(value) if self.is_repeated else self.kind(value)
        return value

    @property
    def is_enum(self) -> bool:
        return isinstance(self.kind, type) and issubclass(self.kind, enum.Enum)

    @property
    def parse(self) -> Callable[[str], Any] | None:
        """Return the function that makes a value of the text that a user types; None if the text is the value."""
        if self.kind is str:
            return None
        if self.kind is Path:
            return _path
        if self.kind is Mapping:
            return _json_object
        return getattr(self.kind, "parse", self.kind)  # type: ignore[no-any-return]

    @property
    def typed_default(self) -> Any:
        """Return the default in the form that a user types: for an enum its value, for a tuple a text with commas.

        The default of a flag that may be repeated is not changed, except that () becomes a list.
        """
        if self.is_enum:
            return self.default.value
        if self.is_repeated or not isinstance(self.default, tuple):
            return [] if self.default == () else self.default
        return ",".join(str(getattr(each, "value", each)) for each in self.default)

    def taken(self, value: Any) -> Any:
        """Return the value that the command line would parse if a user typed the one that a Python program gives.

        Raises:
            ConfigError: the program's value has a wrong type.
        """
        if self.is_repeated:
            return [self._taken(each) for each in (value if isinstance(value, list | tuple) else [value])]
        return self._taken(value)

    def _taken(self, value: Any) -> Any:
        if self.kind is bool and isinstance(value, bool):
            return value
        text = json.dumps(value) if isinstance(value, dict | list) else str(getattr(value, "value", value))
        try:
            if self.kind is bool or isinstance(value, bool):
                raise ValueError(text)
            return text if self.parse is None else self.parse(text)
        except ValueError as exc:
            choices = [each.value for each in self.kind] if self.is_enum else []
            expected = f"one of {', '.join(choices)}" if choices else EXPECTED.get(self.kind, "a text")
            raise ConfigError(f"{self.setting.key} {value!r} is not valid: {expected} is expected") from exc


def _path(text: str) -> Path:
    """Return a path, made absolute if it begins with `./`: Path drops that, and the rest could look like a hub id."""
    return Path(text).absolute() if text.startswith("./") else Path(text)


def _json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; dashes in its names become underscores, as in names of flags.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{text} is not a JSON object")
    return {name.replace("-", "_"): each for name, each in value.items()}


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the end of an error message, X being the one of `names` most like `name`.

    Returns an empty text if none is like it.
    """
    known = [*names]
    usual = [ELSEWHERE[name]] if ELSEWHERE.get(name) in known else []
    found = usual or get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def read(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a configuration of class `kind`, made from the value of each flag.

    Args:
        kind: dataclass of the configuration.
        values: parsed values by the names of flags; every setting of the configuration needs one.

    Raises:
        ConfigError: a value is out of range, or conflicts with another one.
        InvalidRequestError: a parameter of a request is out of range.
    """
    return _read(_whole(kind), values)  # type: ignore[no-any-return]


def read_given(kind: type[T], given: Mapping[str, Any], *, name: str) -> T:
    """Return a configuration of class `kind`, made from the values that a Python program gives.

    A setting that is None or not given has its default.

    Args:
        given: values by the names of flags.
        name: name of the class that has these settings as keyword arguments, such as LLM, for error messages.

    Raises:
        ConfigError, InvalidRequestError: a name is no setting, or a value is out of range or of another type.
    """
    settings = {flag.removeprefix("--"): each for each in declared(kind) for flag in each.setting.names}
    values = {each.setting.key: each.default for each in settings.values()}
    for key, value in given.items():
        if (setting := settings.get(key)) is None:
            known = ", ".join(sorted(filter(str.isidentifier, settings)))
            raise ConfigError(f"{name} has no setting {key}{did_you_mean(key, settings)}; there are {known}")
        if value is not None:
            values[setting.setting.key] = setting.taken(value)
    return read(kind, values)


def declared(kind: type[Any]) -> Iterator[Declared]:
    """Yield the settings of a configuration and of all configurations within it.

    The same setting comes twice if two of these configurations declare it.
    """
    return _declared(_whole(kind))


def _read(group: Group, values: Mapping[str, Any]) -> Any:
    if group.needs and all(values[key] is None for key in group.needs):
        for each in _declared(group):
            each.setting.check(each.setting.key, each.value(values))
        return None
    made = group.kind(**{name: _value(part, values) for name, part in _parts(group)})
    check(made)
    return made


def _value(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, Group):
        return _read(part, values)
    return part.value(values) if isinstance(part, Declared) else part


def _whole(kind: type[Any]) -> Group:
    return Group(kind, getattr(kind, "SECTION", None))


def _declared(group: Group) -> Iterator[Declared]:
    for _, part in _parts(group):
        if isinstance(part, Group):
            yield from _declared(part)
        elif isinstance(part, Declared):
            yield part


def _parts(group: Group) -> Iterator[tuple[str, Any]]:
    """Yield the name of each field of a configuration that has a flag, is a configuration itself, or has a fixed value.

    With the name come the field's `Declared`, its `Group`, or the value that the `changes` of the group give it.
    """
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
            yield each.name, Declared(*kind, default, setting)
        elif change is not each:
            yield each.name, change


def _inner(inner: Group, outer: Group) -> Group:
    section = inner.section or _whole(inner.kind).section or outer.section
    return replace(inner, section=section, without=inner.without | outer.without)


def _default_of(declared: Field[Any]) -> Any:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of a flag's values and whether the flag may be repeated, by the type hint of its field."""
    if NoneType in get_args(hint):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return get_origin(hint) or hint, False
