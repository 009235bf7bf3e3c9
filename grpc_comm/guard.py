"""Guard of a server: the steps around each handler, in their order, from admission to the status of a failure."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from grpc_comm.call import CAN_MOVE, Call, Context, Limit
from grpc_comm.errors import Status, StatusError
from grpc_comm.tls import names_in

logger = logging.getLogger(__name__)

StatusOf = Callable[[Exception], Status | None]
Handler = Callable[[Any, Call], Awaitable[Any]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
Headers = Mapping[str, str]
Trailers = tuple[tuple[str, str], ...]
Admit = Callable[[str, Headers, Sequence[str] | None], tuple[Trailers, AbstractContextManager[object]]]
"""(method, headers, names in the client's certificate if the port takes one) -> trailers, and a block around the call
that raises if the client may not make it."""
OpenSpan = Callable[[str, Headers, dict[str, str]], AbstractContextManager[object]]
"""(name, headers of the call, attributes) -> a block with a span."""

MAX_MESSAGE_CHARACTERS = 2000
"""Limit of a status message: above 16 kB of trailers a client would read RESOURCE_EXHAUSTED instead of the status."""
MAX_HEALTH_REQUEST_BYTES = 64 * 1024
ABORT_S = 1.0
"""Longest wait of a status for a peer that does not read; then the call is dropped without a status."""
FIRST_MESSAGE_S = 30.0
"""Longest wait for a call's first message: half a megabyte takes a slow link a while."""
MAX_WAITING = 256
_MOVED = Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down: go on at another one")


@dataclass(frozen=True, slots=True)
class Gate:
    """Way of calls into a server: its ports, and what is put around each call.

    Attributes:
        credentials: TLS of the port; None is plain text.
        mtls_address: HOST:PORT of a second port, for clients with a certificate: grpcio knows no optional ones.
        mtls_credentials: TLS of the second port.
        admit: admits or refuses a call before anything of its request is parsed; the default admits every call.
        open_span: opens a span for each call of our services.
        stall_timeout_s: seconds that a write of our services may wait for a peer that reads nothing.
    """

    credentials: grpc.ServerCredentials | None = None
    mtls_address: str | None = None
    mtls_credentials: grpc.ServerCredentials | None = None
    admit: Admit = lambda method, headers, names: ((), nullcontext())
    open_span: OpenSpan = lambda name, headers, attributes: nullcontext()
    stall_timeout_s: float = math.inf


OPEN = Gate()


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor that puts the same steps around every method of a server, gRPC's own services included.

    The steps of a call, in order: `Gate.admit`, before a byte of the request is parsed; the first message, within
    FIRST_MESSAGE_S; for our services a span and, if the client can go on elsewhere, the end by `move`; the handler; the
    status of its failure. A handler is a coroutine on the event loop and never touches gRPC's context:

        async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:      # one request, many responses
            async for event in self._completer.complete(completion_from_message(request)):
                await call.write(event_to_message(event))

        async def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:   # one of each
            return card_to_message(self._card)

    A method that streams requests gets `call.messages()` in place of the request. A handler fails by raising: a
    StatusError ends the call with its status, any other exception with `status_of`, and one that is unknown there
    with INTERNAL and a log record. It is cancelled when the client leaves; `call.write` raises StatusError (ABORTED)
    after `Gate.stall_timeout_s` without a reader.

    Args:
        status_of: maps exceptions of handlers to statuses; None makes the status INTERNAL.
        max_bytes: limit of a request message in bytes, by service name; other services are health and reflection.
        gate: admission, spans and limits of the port.
    """

    def __init__(self, status_of: StatusOf, max_bytes: Mapping[str, int], gate: Gate) -> None:
        self._status_of = status_of
        self._max_bytes = max_bytes
        self._gate = gate
        self._waiting: dict[Limit, None] = {}  # for their first message
        self._movable: dict[Limit, None] = {}
        self._moves = False
        self._methods: dict[str, Any] = {}

    def move(self) -> None:
        """End all movable calls, present and future."""
        self._moves = True
        for limit in [*self._movable]:
            limit.end(_MOVED)

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the guarded method of a call. gRPC asks at every call; a method is wrapped once."""
        method, name = await continuation(handler_call_details), handler_call_details.method
        if method is not None and name not in self._methods:
            self._methods[name] = self._guarded(method, name)
        return self._methods.get(name)

    def _guarded(self, method: Any, name: str) -> Any:
        """Return the method as one that streams both ways: for single messages gRPC itself waits without a limit."""
        handler = _handler(method)

        async def guard(_: object, context: Context) -> None:
            try:
                headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
                trailers, admitted = self._gate.admit(name, headers, _names(context))
                context.set_trailing_metadata(trailers)
                with admitted:
                    first = await self._first(context)
                    if first is grpc.aio.EOF and not method.request_streaming:
                        raise StatusError(Status(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request"))
                    async with self._served(name, headers) as stall_timeout_s:
                        with closing(Call(context, first, stall_timeout_s)) as call:
                            answer = await handler(call.messages() if method.request_streaming else first, call)
                            if not method.response_streaming:
                                await call.write(answer)
            except Exception as exc:
                await _abort(context, self._status(exc))

        max_bytes = self._max_bytes.get(name.split("/")[1], MAX_HEALTH_REQUEST_BYTES)
        parse = _limited(method.request_deserializer, name, max_bytes)
        return grpc.stream_stream_rpc_method_handler(guard, parse, method.response_serializer)

    async def _first(self, context: Context) -> Any:
        """Return the first message of a call.

        gRPC waits for it without a limit, in any number of calls, and each keeps some 20 KB and a hundred objects that
        every garbage collection looks at while no other call is served. Here it waits for `FIRST_MESSAGE_S`, in
        `MAX_WAITING` calls: one more ends the call that has waited longest.
        """
        if len(self._waiting) >= MAX_WAITING:
            text = f"{MAX_WAITING} later calls wait for their first message too"
            next(iter(self._waiting)).end(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
        late = Status(grpc.StatusCode.DEADLINE_EXCEEDED, f"no first message came for {FIRST_MESSAGE_S:g} s")
        async with Limit(late, FIRST_MESSAGE_S, self._waiting):
            return await context.read()

    @asynccontextmanager
    async def _served(self, name: str, headers: Headers) -> AsyncGenerator[float, None]:
        """Put span and limits around a call of our services; yield the time that its writes may take."""
        if name.startswith("/grpc."):
            yield math.inf
            return
        name = name.removeprefix("/")
        service, _, method = name.rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        can_move = dict(CAN_MOVE).items() <= headers.items()
        movable = Limit(_MOVED, 0.0 if self._moves else None, self._movable) if can_move else nullcontext()
        with self._gate.open_span(name, headers, attributes):
            async with movable:
                yield self._gate.stall_timeout_s

    def _status(self, exc: Exception) -> Status:
        if isinstance(exc, StatusError):
            return exc.status
        if isinstance(exc, grpc.aio.InternalError | grpc.aio.UsageError):  # of a write or read without a peer
            return Status(grpc.StatusCode.CANCELLED, "the client has left")
        status = self._status_of(exc)
        if status is None:
            logger.error("a call failed unexpectedly", exc_info=exc)
            return Status(grpc.StatusCode.INTERNAL, "unexpected failure; the server's log has the cause")
        return status


def _handler(method: Any) -> Handler:
    """Return the handler of a method; one that yields its responses, as reflection's does, as one that writes them."""
    handler: Any = method.unary_unary or method.unary_stream or method.stream_unary or method.stream_stream
    if not inspect.isasyncgenfunction(handler):
        return handler  # type: ignore[no-any-return]

    async def writing(request: Any, call: Call) -> None:
        async for response in handler(request, call):
            await call.write(response)

    return writing


def _names(context: Context) -> Sequence[str] | None:
    """Return the names in the client's certificate; None if the port takes no certificates."""
    certificates = context.auth_context().get("x509_pem_cert")
    return names_in(next(iter(certificates))) if certificates else None


def _limited(parse: Callable[[bytes], Any], method: str, max_bytes: int) -> Callable[[bytes], Any]:
    """Return the parser for messages of a limited length.

    A message of empty submessages takes a hundred times its size and seconds to parse, in which no other call is
    served.

    Raises:
        StatusError: the message is longer, or is malformed.
    """

    def limited(data: bytes) -> Any:
        if len(data) <= max_bytes:
            try:
                return parse(data)
            except DecodeError:
                fault = f"{len(data)} bytes that are no message of this method"
        else:
            fault = f"a message of {len(data)} bytes exceeds the limit of {max_bytes}"
        logger.info("%s: %s", method, fault)
        raise StatusError(Status(grpc.StatusCode.INVALID_ARGUMENT, fault))

    return limited


async def _abort(context: Context, status: Status) -> None:
    """End a call with a status; drop it without one if the peer does not read."""
    message = " ".join(status.message.split())[:MAX_MESSAGE_CHARACTERS]  # it may quote what a client sent
    trailers = (*(context.trailing_metadata() or ()), *status.trailing_metadata())  # abort replaces what was set
    abort = asyncio.ensure_future(context.abort(status.code, message, trailers))
    abort.add_done_callback(lambda task: task.cancelled() or task.exception())  # it always raises
    await asyncio.wait([abort], timeout=ABORT_S)
    if not abort.done() or isinstance(abort.exception(), grpc.aio.InternalError):
        # It waits, or is refused, after a write that the peer does not read. Ending without a status resets the stream.
        abort.cancel()
        raise asyncio.CancelledError
    asyncio.get_running_loop().call_soon(_forget, abort.exception())
    abort.result()


def _forget(error: BaseException | None) -> None:
    """Release the frames that a call failed in.

    gRPC's state of a call keeps its error, and the error's frames keep that state. Thousands of such cycles would
    wait for a full garbage collection, which stops the process for as long as it takes to free them all.
    """
    if error is not None:
        error.__traceback__ = error.__context__ = None
