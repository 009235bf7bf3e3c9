"""Mutations of protobuf messages: first of their fields, by their descriptors, and then of their bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 99),
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "x", "\0", "\ufffd", "\U0001f600" * 9, "<|bos|>", "system", "{% for %}", "a" * 3000, "\r\n", "\u202e")
_COUNTS = (0, 1, 1, 2, 3, 17, 300, 2000)
_MAX_DEPTH = 4


class Mutator:
    """Maker of mutated protobuf messages; equal random generators give equal messages."""

    def __init__(self, draw: random.Random, *, vocab_size: int) -> None:
        self._draw = draw
        self._numbers = (
            0,
            1,
            2,
            7,
            255,
            4096,
            vocab_size - 1,
            vocab_size,
            2**31 - 1,
            2**31,
            2**32 - 1,
            2**63,
            2**64 - 1,
        )

    def message(self, seed: Message) -> bytes:
        """Return the bytes of a mutated copy of `seed`; some are valid, some break a rule, some cannot be parsed."""
        message = type(seed)()
        message.CopyFrom(seed)
        for _ in range(self._draw.choice((0, 1, 1, 2, 5))):
            self._change(message, _MAX_DEPTH)
        data = message.SerializeToString()
        return self._draw.choice(_DAMAGES)(self._draw, data) if self._draw.random() < 0.3 else data

    def _change(self, message: Any, depth: int) -> None:
        """Change one random field of a message, or of a message within it down to `depth` levels, in place."""
        described = self._draw.choice(message.DESCRIPTOR.fields or [None])
        if described is None or self._draw.random() < 0.1:
            if described is not None:
                message.ClearField(described.name)
        elif described.is_repeated:
            self._fill(getattr(message, described.name), described, depth)
        elif described.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            below = getattr(message, described.name)
            below.SetInParent()
            if depth:
                self._change(below, depth - 1)
        else:
            setattr(message, described.name, self._value(described))

    def _fill(self, elements: Any, described: Any, depth: int) -> None:
        count = self._draw.choice(_COUNTS)
        if described.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            elements.extend(self._value(described) for _ in range(count))
            return
        for _ in range(count):
            element = elements.add()
            if depth and len(elements) < 20:
                self._change(element, depth - 1)

    def _value(self, described: Any) -> Any:
        kind, draw = described.cpp_type, self._draw
        if kind in _RANGES:
            low, high = _RANGES[kind]
            return min(max(draw.choice(self._numbers), low), high)
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return draw.choice(_FLOATS)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        text = draw.choice(_TEXTS)
        return text.encode() if described.type == FieldDescriptor.TYPE_BYTES else text


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flip(draw: random.Random, data: bytes) -> bytes:
    """Return the bytes with one to four bits flipped; most change a value, some a wire type or a length."""
    changed = bytearray(data)
    for _ in range(min(len(data), draw.choice((1, 1, 4)))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _insert(draw: random.Random, data: bytes) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.randbytes(draw.choice((1, 4, 40))) + data[place:]


def _repeat(draw: random.Random, data: bytes) -> bytes:
    """Return the bytes of a message 2, 3 or 50 times in a row, which a parser merges into one message."""
    return data * draw.choice((2, 3, 50))


def _noise(draw: random.Random, _: bytes) -> bytes:
    return draw.randbytes(draw.choice((1, 8, 64, 1000)))


def _nest(draw: random.Random, data: bytes) -> bytes:
    """Return the bytes of a message with up to 5000 starts of protobuf groups after it, which nest and never end."""
    return data + b"\x0b" * draw.choice((1, 50, 5000))


_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (_cut, _flip, _flip, _insert, _repeat, _noise, _nest)
