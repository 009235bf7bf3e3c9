"""Trace context of incoming calls. Knows no tracing library: whoever makes spans is given their headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from grpc_comm.interceptors import Context, Handler, HandlerInterceptor, texts

Headers = Mapping[str, str]
OpenSpan = Callable[[str, Headers, dict[str, str]], AbstractContextManager[object]]
"""(name, headers of the call, attributes) -> a span while the block runs"""


class SpanInterceptor(HandlerInterceptor):
    """A span around every call of our services."""

    def __init__(self, open_span: OpenSpan) -> None:
        self._open_span = open_span

    def wrap(self, behavior: Handler, name: str) -> Handler:
        """See `HandlerInterceptor`."""
        name = name.removeprefix("/")
        service, _, method = name.rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

        async def traced(request: Any, context: Context) -> Any:
            with self._open_span(name, texts(context.invocation_metadata()), attributes):
                return await behavior(request, context)

        return traced
