"""Channels to this project's servers: opening one, waiting for its connection, finding why it fails."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import cast

import grpc

from specdec.grpc_comm.options import CHANNEL_OPTIONS, Options
from specdec.grpc_comm.secured import Credentials, Headers, SecuredChannel
from specdec.grpc_comm.tls import ClientTls, greeting, split_address

LOOK_S = 1.0
"""Longest time in seconds of a connection that is made only to find out what a server speaks."""


class UnreachableError(Exception):
    """Failure to reach a server at an address."""


class HandshakeError(UnreachableError):
    """Failure to agree on TLS with a server; dialling again does not help."""


def open_channel(
    address: str, credentials: Credentials | None = None, *headers: Headers, options: Options = CHANNEL_OPTIONS
) -> grpc.aio.Channel:
    """Open a channel to HOST:PORT, which connects when it is first used; close it when done.

    Args:
        credentials: certificates and token of the client; None: plain text without a token.
        headers: functions that return headers to add to each call.
        options: gRPC's options of the channel.

    Raises:
        UnusableError: the credentials' files cannot be used.
    """
    if credentials is None and not headers:
        return grpc.aio.insecure_channel(address, options=options)
    return cast(grpc.aio.Channel, SecuredChannel(address, credentials or Credentials(), *headers, options=options))


async def wait_until_ready(
    channel: grpc.aio.Channel, address: str, *, timeout_s: float, tls: ClientTls | None = None
) -> None:
    """Wait until a channel is connected; a client calls this once, when it starts.

    Args:
        address: HOST:PORT that the channel dials, to find out why it does not connect.
        tls: the channel's certificates; None: it is plain text.

    Raises:
        UnreachableError: there is no connection after `timeout_s` seconds. Raised at once if the host is unknown, or
            if the server of a plain-text channel speaks HTTP/1.
        HandshakeError: the server and this client cannot agree on TLS.
    """
    await _look(address, min(timeout_s, LOOK_S), tls)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        answer = await _look(address, LOOK_S, tls)  # the server may have started meanwhile
        hint = (
            ": what listens there ends the connection. Is it TLS (--tls_ca)?" if answer == b"" else "; is it started?"
        )
        raise UnreachableError(f"no server answers at {address} within {timeout_s:g} s{hint}") from None


async def _look(address: str, timeout_s: float, tls: ClientTls | None) -> bytes | None:
    """Return the first bytes that a plain-text server answers; None if none answers yet, or if there is TLS.

    Raises:
        UnreachableError: the server can never be reached, however long a client waits.
    """
    try:
        if tls is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.get_running_loop().getaddrinfo(*split_address(address))
            await check_handshake(address, tls, timeout_s)
            return None
        answer = await greeting(address, timeout_s)
    except socket.gaierror as exc:
        raise UnreachableError(f"{address}: the host is not known ({exc.strerror})") from exc
    if answer == b"HTTP/1.":
        raise UnreachableError(f"{address} speaks HTTP, not gRPC: is it the port of a gateway, of metrics, or a proxy?")
    return answer


async def check_handshake(address: str, tls: ClientTls, timeout_s: float = LOOK_S) -> None:
    """Try a TLS handshake with a server; return if it succeeds, or if no server answers within `timeout_s` seconds.

    Raises:
        HandshakeError: a server answers and the handshake fails; the message has the reason.
    """
    fault = await tls.fault(address, timeout_s)
    if fault is not None:
        raise HandshakeError(f"no TLS with {address}: {fault}")
