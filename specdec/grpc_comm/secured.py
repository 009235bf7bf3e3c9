"""Channel that authenticates its client, by a certificate or by a token with each call, and adds headers to calls.

Certificates and tokens are in files that may be replaced while the channel is open; the latest versions are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partialmethod
from pathlib import Path
from typing import Any

import grpc

from specdec.grpc_comm.options import CHANNEL_OPTIONS, Options
from specdec.grpc_comm.tls import ClientTls
from specdec.grpc_comm.watched import UnusableError, Watched

AUTHORIZATION = "authorization"
RETIRE_S = 3600.0
"""Seconds for which calls may continue on a certificate that has been replaced."""
LOOK_S = 5.0
"""Seconds between checks for new certificates while `wait_for_state_change` waits for a channel."""
Headers = Callable[[], Mapping[str, str]]
"""Function that returns the headers of a call when it begins."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a client.

    Attributes:
        tls: certificates of the client and the CAs that it trusts; None: the channel is plain text.
        token: bearer token that is sent with each call; None if there is none.
    """

    tls: ClientTls | None = None
    token: Watched[str] | None = None


@cache
def watched_token(path: Path) -> Watched[str]:
    """Return the access token in a file, which is read again when the file changes.

    All calls with one path return the same object, so a new channel has a token even while the file is being written.

    Raises:
        UnusableError: the file has no token.
    """

    def read() -> str:
        text = path.read_bytes().strip()
        if not text or not text.isascii() or len(text.split()) != 1:
            raise UnusableError(f"{path} holds no token: one word of ASCII is expected")
        return text.decode("ascii")

    return Watched([path], read)


def watched_keys(tls: ClientTls) -> Watched[grpc.ChannelCredentials]:
    """Return the TLS credentials of channels, the same object for all that differ only in the server's name.

    Raises:
        UnusableError: the files cannot be used.
    """
    return _watched_keys(replace(tls, server_name=None))


@cache
def _watched_keys(tls: ClientTls) -> Watched[grpc.ChannelCredentials]:
    return Watched(tls.paths, tls.grpc_credentials)


class SecuredChannel:
    """Channel with the part of gRPC's interface that stubs and `grpc_comm` use; it may replace its connection.

    When the certificates in the files change, it opens a new connection; calls that have begun may go on over the
    previous one for `RETIRE_S` seconds. Client interceptors could send headers too, but they put a queue and a task
    between a stream and its writer.

    Args:
        credentials: certificates and token of the client.
        headers: functions that return further headers of each call.
        options: gRPC's options of the channel.

    Raises:
        UnusableError: the credentials' files cannot be used. Later, the last good version stays in use.
    """

    def __init__(
        self, address: str, credentials: Credentials, *headers: Headers, options: Options = CHANNEL_OPTIONS
    ) -> None:
        self._address = address
        self._headers = headers
        self._token = credentials.token
        tls = credentials.tls
        self._options: list[tuple[str, Any]] = [*options]
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._tls = None if tls is None else watched_keys(tls)
        self._retiring: set[asyncio.Task[None]] = set()
        self._channel = self._open()

    def _open(self) -> grpc.aio.Channel:
        self._keys = None if self._tls is None else self._tls.get()
        if self._keys is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._keys, options=self._options)

    def _current(self) -> grpc.aio.Channel:
        if self._tls is not None and self._tls.get() is not self._keys:
            retiring = asyncio.create_task(self._channel.close(RETIRE_S), context=Context())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            self._channel = self._open()
        return self._channel

    def _calling(self, kind: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return a method's callable for stubs, which adds token and headers, and uses the present connection.

        Args:
            kind: name of gRPC's function that makes such a callable of `args` and `kwargs`, such as "unary_unary".
        """

        @lru_cache(maxsize=1)
        def begin(channel: grpc.aio.Channel) -> Callable[..., Any]:
            return getattr(channel, kind)(*args, **kwargs)  # type: ignore[no-any-return]

        def call(*call_args: Any, metadata: Any = (), **call_kwargs: Any) -> Any:
            return begin(self._current())(*call_args, metadata=(*(metadata or ()), *self._shown()), **call_kwargs)

        return call

    unary_unary = partialmethod(_calling, "unary_unary")
    unary_stream = partialmethod(_calling, "unary_stream")
    stream_stream = partialmethod(_calling, "stream_stream")

    def _shown(self) -> list[tuple[str, str]]:
        shown = [header for headers in self._headers for header in headers().items()]
        return shown if self._token is None else [*shown, (AUTHORIZATION, f"Bearer {self._token.get()}")]

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        """Wait until the state is not `last`, or until the channel is replaced, which is checked every `LOOK_S`."""
        channel = self._channel
        waiting = asyncio.ensure_future(channel.wait_for_state_change(last))
        try:
            while channel is self._current() and not waiting.done():
                await asyncio.wait([waiting], timeout=LOOK_S)
            error = waiting.exception() if waiting.done() else None
            if error is not None and channel is self._channel:
                raise error  # its user has closed the channel
        finally:
            waiting.cancel()

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for task in self._retiring:
            task.cancel()
        await self._channel.close(grace)

    async def __aenter__(self) -> SecuredChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
