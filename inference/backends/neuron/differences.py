"""In which settings two compiled models differ, name by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NOTHING: tuple[Any, ...] = (None, False, {}, [])
"""What a setting is where it is not named: versions of NxDI name more or fewer of them."""


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs, such as `neuron_config.tp_degree 8 there, 2 asked`; sorted by name."""
    ours, theirs = dict(flat(asked)), dict(flat(there))
    names = sorted(ours.keys() | theirs.keys())
    return [
        f"{name} {_shown(theirs.get(name))} there, {_shown(ours.get(name))} asked"
        for name in names
        if theirs.get(name) != ours.get(name) and not (theirs.get(name) in _NOTHING and ours.get(name) in _NOTHING)
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings, under its dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
