"""Channel and server options, each with its reason."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_COMMON: list[tuple[str, int]] = [
    # Long prompts travel as token ids: 1 million of them need about 3 MB, more than the default of 4 MB allows twice.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without closing its connection is noticed after 10 + 5 seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # Keepalive goes on while a long pass keeps a stream silent.
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # A target that comes back is found within a second, not after a minute of growing back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # Accept the pings above; the default (one in 5 minutes) would close the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers must not share a port by accident: the second one is told that it is taken.
    ("grpc.so_reuseport", 0),
]
