"""Errors of a gRPC client at whose address there is no gRPC server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specdec.grpc_comm.channel import UnreachableError, open_channel, wait_until_ready
from specdec.grpc_comm.server import Server
from specdec.grpc_comm.tls import ClientTls


async def told_of(address: str, *, timeout_s: float, tls: ClientTls | None = None) -> str:
    async with open_channel(address) as channel:
        with pytest.raises(UnreachableError) as caught:
            await wait_until_ready(channel, address, timeout_s=timeout_s, tls=tls)
    return str(caught.value)


@pytest.mark.parametrize("tls", [None, ClientTls(Path("ca.pem"))], ids=["plain", "TLS"])
async def test_an_unknown_host_is_an_error_at_once(tls: ClientTls | None) -> None:
    """Dialling a host that does not exist fails at once, with its name in the error.

    Regression: a misspelt host led to ten seconds of silence, and then to "no server answers".
    """
    async with asyncio.timeout(60):
        assert "the host is not known" in await told_of("no-such-host.invalid:50051", timeout_s=600, tls=tls)


async def test_a_port_of_http_is_an_error_at_once() -> None:
    """Dialling an HTTP/1 port by gRPC fails at once.

    Regression: a client that dialled the gateway's port, or that for metrics, waited and got no error.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(60):
            assert "speaks HTTP, not gRPC" in await told_of(f"127.0.0.1:{port}", timeout_s=600)


async def test_a_port_without_a_server_yet_is_waited_for() -> None:
    """A client waits for a server that starts a little later than the client."""
    server = Server("127.0.0.1:0", [], status_of=lambda _: None)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        waiting = asyncio.create_task(wait_until_ready(channel, f"127.0.0.1:{server.port}", timeout_s=60))
        await asyncio.sleep(0.05)
        await server.open()
        await waiting
    await server.close()
