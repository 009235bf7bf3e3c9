"""Channel and server options, each with its reason."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default. A server whose context is so long that requests need more takes more; see `server_options`."""
MIN_REQUEST_BYTES = 640 * 1024
"""So many bytes parse within 50 ms even if they are all empty submessages; a text of 128k tokens fits in."""
_BYTES_PER_TOKEN = 5
_BYTES_BESIDE_TOKENS = 64 * 1024
MAX_CONNECTIONS = 4096
"""Each takes a descriptor, of which a process has so many and no more; further ones are closed at once."""
MAX_STREAMS_PER_CONNECTION = 256
"""Further calls wait at the client; our own open one channel per server and some tens of streams on it."""

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
    # it was away, and after 5 s at most. With the default, a minute, requests would give up first (30 s); with a
    # second, a fleet of drafts meets the target that comes back with more handshakes than it can take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Despite its name the time a dial may take: 20 s by default, for which one that began in a black hole hangs.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # An answer is a few tokens; what is longest is a chat template.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # the server says what it takes
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    # Behind a balancer of connections a new server gets work, and an old one loses it, only when connections are made
    # anew. gRPC spreads the age by a tenth either way, so that not all come back at once, and grace is without end: a
    # stream in flight is never cut. Connections on which nothing runs end with it too, so that none needs an idle time.
    ("grpc.max_connection_age_ms", 30 * 60_000),
    # Accept the pings above; the default (one in 5 minutes) would close the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers must not share a port by accident: the second one is told that it is taken.
    ("grpc.so_reuseport", 0),
]


def max_request_bytes(max_length: int) -> int:
    """The longest request message that a context of so many tokens can have a use for."""
    return max(MIN_REQUEST_BYTES, _BYTES_BESIDE_TOKENS + _BYTES_PER_TOKEN * max_length)


def server_options(longest_request_bytes: int) -> list[tuple[str, int]]:
    """What a server is opened with whose longest request is so long; gRPC refuses what is far above it unread."""
    return [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max(MAX_MESSAGE_BYTES, longest_request_bytes))]
