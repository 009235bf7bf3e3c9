"""Channels to our servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import cast

import grpc

from grpc_comm.options import CHANNEL_OPTIONS
from grpc_comm.secured import Credentials, Headers, SecuredChannel
from grpc_comm.tls import ClientTls, greeting

LOOK_S = 1.0


class UnreachableError(Exception):
    """Nobody answers at an address."""


class HandshakeError(UnreachableError):
    """Who answers there and we cannot agree on TLS; dialling again does not help."""


def open_channel(address: str, credentials: Credentials | None = None, *headers: Headers) -> grpc.aio.Channel:
    """Open a channel to HOST:PORT, which connects when it is first used; close it when done.

    Args:
        headers: of each call.

    Raises:
        UnusableError: the credentials' files.
    """
    if credentials is None and not headers:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return cast(grpc.aio.Channel, SecuredChannel(address, credentials or Credentials(), *headers))


async def wait_until_ready(
    channel: grpc.aio.Channel, address: str, *, timeout_s: float, tls: ClientTls | None = None
) -> None:
    """Wait for the connection; for start-up only.

    Raises:
        UnreachableError: there is none after `timeout_s` seconds, or waiting is in vain: nobody has heard of the host,
            or what listens there speaks HTTP/1.
        HandshakeError: or there is no TLS with it.
    """
    await _look(address, min(timeout_s, LOOK_S), tls)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        answer = await _look(address, LOOK_S, tls)  # it may have come meanwhile
        hint = ": what listens there ends the connection. Is it TLS (--tls_ca)?" if answer == b"" else ""
        raise UnreachableError(f"no server answers at {address} within {timeout_s:g} s{hint}") from None


async def _look(address: str, timeout_s: float, tls: ClientTls | None) -> bytes | None:
    """See who listens. What is not clear is left to the channel: a server may just be starting."""
    if tls is not None:
        await check_handshake(address, tls, timeout_s)
        return None
    try:
        answer = await greeting(address, timeout_s)
    except socket.gaierror as exc:
        raise UnreachableError(f"{address}: the host is not known ({exc.strerror})") from exc
    if answer == b"HTTP/1.":
        raise UnreachableError(f"{address} speaks HTTP, not gRPC: is it the port of a gateway, of metrics, or a proxy?")
    return answer


async def check_handshake(address: str, tls: ClientTls, timeout_s: float = LOOK_S) -> None:
    """Make a handshake, to tell whoever cannot be talked to from who is not there.

    Raises:
        HandshakeError: it fails, for a reason that is named.
    """
    fault = await tls.fault(address, timeout_s)
    if fault is not None:
        raise HandshakeError(f"no TLS with {address}: {fault}")


async def states(channel: grpc.aio.Channel) -> AsyncGenerator[grpc.ChannelConnectivity, None]:
    """Yield the connection's state now and whenever it changes, reconnecting when it is lost; ends when cancelled."""
    while True:
        state = channel.get_state(try_to_connect=True)
        yield state
        await channel.wait_for_state_change(state)
