"""Channels to our servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc

from grpc_comm.options import CHANNEL_OPTIONS


class UnreachableError(Exception):
    """Nobody answers at an address."""


def open_channel(address: str) -> grpc.aio.Channel:
    """A lazy channel to HOST:PORT; close it when done."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def wait_until_ready(channel: grpc.aio.Channel, address: str, *, timeout_s: float) -> None:
    """Wait for the connection; for start-up only.

    Raises:
        UnreachableError: there is none after `timeout_s` seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        raise UnreachableError(f"no server answers at {address} within {timeout_s:g} s") from None


async def states(channel: grpc.aio.Channel) -> AsyncGenerator[grpc.ChannelConnectivity, None]:
    """What the connection is now, and whenever that changes; it is made again when it is lost. Ends by cancelling."""
    while True:
        state = channel.get_state(try_to_connect=True)
        yield state
        await channel.wait_for_state_change(state)
