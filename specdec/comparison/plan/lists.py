"""Parsers of flags with several values in one comma-separated word."""

from __future__ import annotations

import argparse
import enum
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

ValueT = TypeVar("ValueT")
EnumT = TypeVar("EnumT", bound=enum.Enum)


def list_of(convert: Callable[[str], ValueT]) -> Callable[[str], tuple[ValueT, ...]]:
    """Return a parser of comma-separated values, each of which `convert` reads."""

    def parse(text: str) -> tuple[ValueT, ...]:
        parts = [part.strip(' "') for part in text.strip("[] ").split(",")]  # also accepts an array of a --config file
        return tuple(convert(part) for part in parts if part)

    parse.__name__ = f"list of {convert.__name__}"  # for argparse's message
    return parse


def one_of(kind: str, values: Iterable[EnumT]) -> Callable[[str], EnumT]:
    """Return a parser of texts that are the values of these enum members; `kind` is the word for them in errors."""
    by_name = {value.value: value for value in values}

    def parse(text: str) -> EnumT:
        if text not in by_name:
            raise argparse.ArgumentTypeError(f"{kind} {text} is none of {', '.join(by_name)}")
        return by_name[text]

    return parse


_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def time_of(text: str) -> str:
    """Return a time above 0, as 90s, 10m or 1h, unchanged; raise ArgumentTypeError for other texts."""
    if not re.fullmatch(r"\d+(?:\.\d+)?[smh]", text) or seconds_of(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 10m or 1h")
    return text


def seconds_of(text: str) -> float:
    """Return the seconds of a time that `time_of` accepts."""
    return float(text[:-1]) * _UNITS_S[text[-1]]


def one_or_two(names: str) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of one number or two, each at least 0; `names` says in errors what they are."""

    def parse(text: str) -> tuple[float, ...]:
        numbers = list_of(float)(text)
        if not 1 <= len(numbers) <= 2 or min(numbers) < 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not {names}, each at least 0")
        return numbers

    return parse
