"""Messages, small once gzipped, whose parsing takes much time or memory before their elements can be counted."""

from __future__ import annotations


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(tag: int, payload: bytes) -> bytes:
    """Return a length-delimited field of a protobuf message; `tag` is its field number."""
    return bytes([tag << 3 | 2]) + varint(len(payload)) + payload


BOMBS: dict[str, bytes] = {
    "biases": field(1, b"x") + field(3, field(9, b"") * 5_000_000),
    "messages": field(9, field(1, b"") * 5_000_000),
    "stops": field(1, b"x") + field(10, b"") * 5_000_000,
    "stop ids": field(1, b"x") + field(5, b"\x01" * 5_000_000),
    "messages below the byte limit": field(9, field(1, b"") * 300_000),
    "role": field(9, field(1, field(1, b"r" * 500_000))),
    "text": field(1, b"lorem ipsum " * 50_000),
}
"""Serialized GenerateRequests, not yet gzipped, each with far too many or too long values of one kind, by that kind."""
