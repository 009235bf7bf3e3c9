"""Channels to our servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

import grpc

from grpc_comm.options import CHANNEL_OPTIONS

LOOK_S = 1.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC says first, with settings that change nothing; a server of HTTP/1 answers in its own words."""


class UnreachableError(Exception):
    """Nobody answers at an address."""


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to HOST:PORT, which connects when it is first used; close it when done."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def wait_until_ready(channel: grpc.aio.Channel, address: str, *, timeout_s: float) -> None:
    """Wait for the connection; for start-up only.

    Raises:
        UnreachableError: there is none after `timeout_s` seconds, or waiting is in vain: nobody has heard of the host,
            or what listens there speaks HTTP/1.
    """
    await _look(address, min(timeout_s, LOOK_S))
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        raise UnreachableError(f"no server answers at {address} within {timeout_s:g} s") from None


async def _look(address: str, timeout_s: float) -> None:
    """See who listens. What is not clear is left to the channel: a server may just be starting."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(_HTTP2_PREFACE)
                answer = await reader.read(len(b"HTTP/1."))
            finally:
                writer.close()
    except socket.gaierror as exc:
        raise UnreachableError(f"{address}: the host is not known ({exc.strerror})") from exc
    except (OSError, TimeoutError):
        return
    if answer == b"HTTP/1.":
        raise UnreachableError(f"{address} speaks HTTP, not gRPC: is it the port of a gateway, of metrics, or a proxy?")


async def states(channel: grpc.aio.Channel) -> AsyncGenerator[grpc.ChannelConnectivity, None]:
    """Yield the connection's state now and whenever it changes, reconnecting when it is lost; ends when cancelled."""
    while True:
        state = channel.get_state(try_to_connect=True)
        yield state
        await channel.wait_for_state_change(state)
