"""Trace context in gRPC metadata. Knows no tracing library: headers come from, and go to, whoever makes spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import grpc

from grpc_comm.interceptors import Context, Handler, HandlerInterceptor, texts

Headers = Mapping[str, str]
OpenSpan = Callable[[str, Headers, dict[str, str]], AbstractContextManager[object]]
"""(name, headers of the call, attributes) -> a span while the block runs"""


class SpanInterceptor(HandlerInterceptor):
    """A span around every call of our services."""

    def __init__(self, open_span: OpenSpan) -> None:
        self._open_span = open_span

    def wrap(self, behavior: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """See `HandlerInterceptor`."""
        name = details.method.removeprefix("/")
        service, _, method = name.rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

        async def traced(request: Any, context: Context) -> Any:
            with self._open_span(name, texts(context.invocation_metadata()), attributes):
                return await behavior(request, context)

        return traced


def carrying(channel: grpc.aio.Channel, headers: Callable[[], Headers]) -> grpc.aio.Channel:
    """Wrap a channel so that each call sends these headers, taken when the call begins."""
    return cast(grpc.aio.Channel, _Carrying(channel, headers))


class _Carrying:
    """A channel; a call's own headers stay with it.

    Client interceptors could do it too, but they put a queue and a task between a stream and its writer.
    """

    def __init__(self, channel: grpc.aio.Channel, headers: Callable[[], Headers]) -> None:
        self._channel = channel
        self._headers = headers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_headers(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_headers(self._channel.unary_stream(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_headers(self._channel.stream_stream(*args, **kwargs))

    def _with_headers(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return begin(*args, metadata=(*(kwargs.pop("metadata", None) or ()), *self._headers().items()), **kwargs)

        return call
