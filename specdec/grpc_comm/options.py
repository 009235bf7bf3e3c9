"""gRPC's options of channels and servers, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Longest message that a client or server receives, gRPC's own default. A server of long contexts takes longer ones,
see `server_options`."""
MIN_REQUEST_BYTES = 640 * 1024
"""Length of a request that every server takes: a text of 128k tokens. A request of this length that is full of
submessages, the worst case, takes 50 ms to parse."""
_BYTES_PER_TOKEN = 5
_BYTES_BESIDE_TOKENS = 64 * 1024
MAX_CONNECTIONS = 4096
"""Limit of a server's connections, each of which takes a file descriptor; further ones are closed at once."""
MAX_STREAMS_PER_CONNECTION = 256
"""Limit of calls on one connection; further ones wait at the client. Our clients have some tens on one channel."""
MAX_PENDING_CALLS = 65_536
"""Limit of calls that have arrived and not begun; gRPC's default is 1,000. gRPC ends a call above the limit by
CANCELLED, without a message or a hint when to try again, and `Guard` never sees it."""

Options: TypeAlias = Sequence[tuple[str, int]]

_COMMON: list[tuple[str, int]] = [
    # A peer that vanished without closing its connection is noticed after 10 + 5 seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # Connections without a call are pinged too, or firewalls and balancers (350 s) forget them, and the next request
    # waits 15 s to find out.
    ("grpc.keepalive_permit_without_calls", 1),
    # Keepalive goes on while a long pass keeps a stream silent.
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # Waits between dials grow by 1.6 with jitter: a target that comes back is found after two thirds of the time that
    # it was away, and after 5 s at most. With the default, a minute, requests would give up first (30 s). With a
    # second, a fleet of drafts would send the returning target more handshakes than it can take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Despite its name, the time that a dial may take. By default a dial that gets no answer hangs for 20 s.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # Most answers are a few tokens; the longest carries a chat template.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # the server enforces its own limit
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # A balancer of connections moves work from an old server to a new one only when clients connect again. gRPC spreads
    # the age by 10 % either way, so that not all reconnect at once. The grace has no end: no running stream is cut.
    # Idle connections end by their age too, so that no idle timeout is needed.
    ("grpc.max_connection_age_ms", 30 * 60_000),
    # Accept the pings above; the default (one in 5 minutes) would close the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers must not share a port by accident: the second one fails to listen.
    ("grpc.so_reuseport", 0),
]


# A target may send a draft worker its tokenizer, of 16 MiB.
WORKER_OPTIONS = [*{**dict(CHANNEL_OPTIONS), "grpc.max_receive_message_length": 17 * 1024 * 1024}.items()]


def max_request_bytes(max_length: int) -> int:
    """Return the bytes of the longest request that a model with a context of `max_length` tokens could answer."""
    return max(MIN_REQUEST_BYTES, _BYTES_BESIDE_TOKENS + _BYTES_PER_TOKEN * max_length)


def server_options(longest_request_bytes: int) -> list[tuple[str, int]]:
    """Return a server's gRPC options.

    Args:
        longest_request_bytes: longest message that the server must receive; it receives MAX_MESSAGE_BYTES at least.
    """
    return [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max(MAX_MESSAGE_BYTES, longest_request_bytes))]
