"""Flags from a JSON or TOML file (`--config FILE`), parsed as if they stood before the command line's own flags.

A file can serve several roles. A key at its top level is taken by each role that has such a flag. A table with the name
of a role is for that role alone, and all of its keys must be flags of the role. Flags of the command line win.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from specdec.inference.errors import ConfigError

OTHERS = "--engine_flag"
"""Flag as which each word after `--` is parsed: --engine_flag=WORD."""


class ConfigFileParser(argparse.ArgumentParser):
    """Parser of one role's flags that also reads them from files, which `--config` names.

    Args:
        role: name of the role.
        roles: for each role, by its name, a function that returns its parser.
    """

    def __init__(self, *, role: str, roles: Mapping[str, Callable[[], ConfigFileParser]], **options: Any) -> None:
        super().__init__(**options)
        self._role = role
        self._roles = roles
        text = "JSON or TOML file of flags; those of the command line win"
        self.add_argument("--config", type=Path, action="append", metavar="FILE", help=text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the flags in the files that the arguments name, then the arguments; see `argparse.ArgumentParser`."""
        arguments = list(args or ())
        own, others = _split(arguments) if OTHERS in self._option_string_actions else (arguments, [])
        try:
            from_files = [text for file in _files(own) for text in self._arguments(file)]
        except ConfigError as error:
            self.error(str(error))
        given = [*map(self._spelled, [*from_files, *own]), *(f"{OTHERS}={each}" for each in others)]
        return super().parse_known_args(given, namespace)

    def _spelled(self, argument: str) -> str:
        """Return an argument with its flag's name spelled as declared, since users may write - or _ in it."""
        name, equals, value = argument.partition("=")
        flags = {_alike(flag): flag for flag in self._option_string_actions}
        return f"{flags.get(_alike(name), name)}{equals}{value}" if name.startswith("--") else argument

    def error(self, message: str) -> NoReturn:
        """Print two lines about a wrong flag, the fault with the flag that was perhaps meant, and a hint; then exit."""
        self.exit(2, f"error: {message}{self._meant(message)}\n`{self.prog} --help` shows the flags\n")

    def _meant(self, message: str) -> str:
        """Return a note that names the flags most similar to those that argparse's error message calls unrecognized."""
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        alike = [get_close_matches(name, self._option_string_actions, n=1) for name in unknown]
        found = " ".join(name for names in alike for name in names)
        return f" (did you mean {found}?)" if found else ""

    def _arguments(self, file: Path) -> Iterator[str]:
        values = {_alike(key): value for key, value in _read(file).items()}
        for key, value in values.items():
            if key in self._roles and isinstance(value, dict):
                continue
            if (action := self._flag(key)) is not None:
                yield from _as_arguments(action, key, value)
            elif not self._is_flag_of_any_role(key):
                raise ConfigError(f"{file}: no role has a flag {key}")
        own = values.get(self._role)
        for key, value in own.items() if isinstance(own, dict) else ():  # --role compile has a flag --compile
            action = self._flag(key)
            if action is None:
                raise ConfigError(f"{file}: role {self._role} has no flag {key}")
            yield from _as_arguments(action, key, value)

    def _flag(self, key: str) -> argparse.Action | None:
        return self._option_string_actions.get(self._spelled(f"--{key}"))

    def _is_flag_of_any_role(self, key: str) -> bool:
        return any(parser()._flag(key) is not None for parser in self._roles.values())


def _alike(flag: str) -> str:
    return flag.replace("-", "_")


def program(command: str, script: str) -> str:
    """Return how to call a command in the way in which this process was called.

    That is `specdec COMMAND` for the installed program, else `script`, the call of a script of the repository.
    """
    called = Path(sys.argv[0])
    is_installed = "specdec" in (called.stem, called.parent.name if called.stem == "__main__" else "")
    return f"specdec {command}" if is_installed else script


def _files(arguments: Sequence[str]) -> Iterator[Path]:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path, action="append", default=[])
    yield from finder.parse_known_args(arguments)[0].config


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after the first `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:  # ValueError: broken JSON or TOML, or not UTF-8
        raise ConfigError(f"configuration file {file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {file}: an object of flags is expected")
    return values


def _as_arguments(action: argparse.Action, key: str, value: Any) -> Iterator[str]:
    """Yield the words with which a user would give a flag this value on the command line.

    A switch that is off becomes --no-KEY if it has such a form, else no word.

    Args:
        action: argparse's action of the flag.
        key: name of the flag in the file, without the hyphens before it.
    """
    if action.nargs == 0:
        if value:
            yield f"--{key}"
        elif any(option.startswith("--no-") for option in action.option_strings):
            yield f"--no-{key}"
        return
    if isinstance(action, argparse._AppendAction) and isinstance(value, list):  # may be repeated
        yield from (f"--{key}={item}" for item in value)
        return
    yield f"--{key}={json.dumps(value) if isinstance(value, dict | list) else value}"


def as_toml(args: argparse.Namespace) -> str:
    """Return the text of a file for `--config` with all parsed flags that have a value, in alphabetical order."""
    values = {name: _as_value(value) for name, value in sorted(vars(args).items()) if value is not None}
    return "".join(f"{name} = {text}\n" for name, text in values.items() if text != '""' and name != "config")


def _as_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_value, value))}]"
    if isinstance(value, tuple):
        return _as_value(",".join(str(getattr(item, "value", item)) for item in value))
    if isinstance(value, dict):
        return _as_value(json.dumps(value))
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
