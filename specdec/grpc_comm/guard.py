"""Guard of a gRPC server: the steps before and after each handler, from admission to the status of a failure."""

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

from specdec.grpc_comm.call import CAN_MOVE, Call, Context, Limit, peer_of
from specdec.grpc_comm.errors import Status, StatusError
from specdec.grpc_comm.secured import AUTHORIZATION
from specdec.grpc_comm.tls import names_in

logger = logging.getLogger(__name__)

StatusOf = Callable[[Exception], Status | None]
Handler = Callable[[Any, Call], Awaitable[Any]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
Headers = Mapping[str, str]
Trailers = tuple[tuple[str, str], ...]
Admit = Callable[[str, Headers, Sequence[str] | None, str], tuple[Trailers, AbstractContextManager[object]]]
"""Function of a call's method, its headers, the names in the client's certificate (None if the port takes none), and
the client's address.

It returns trailers of the response, and a context manager for the time of the call. Either of the two raises if the
client may not make the call.
"""
OpenSpan = Callable[[str, Headers, dict[str, str]], AbstractContextManager[object]]
"""Function of a name, a call's headers and attributes: it returns a context manager that opens a tracing span."""

MAX_MESSAGE_CHARACTERS = 2000
"""Longest message of a status. A client gets RESOURCE_EXHAUSTED instead of a status if trailers exceed 16 kB."""
MAX_HEALTH_REQUEST_BYTES = 64 * 1024
"""Longest request in bytes to a service that is not this project's: health or reflection."""
ABORT_S = 1.0
"""Longest wait in seconds for a peer to read its call's status; then the call ends without a status."""
FIRST_MESSAGE_S = 30.0
"""Longest wait in seconds for a call's first message: half a megabyte takes a slow link a while."""
MAX_WAITING = 256
"""Limit of calls that wait for their first message."""
GONE = {
    "/specdec.v1.VerificationService/Verify": "Verify ended with protocol_version 1: a draft worker with requests "
    "calls Generate with a draft_session, and attaches by Assist with is_private (CHANGELOG.md)"
}
"""Methods that earlier versions had, by name, each with the error message for a client that calls it."""
_MOVED = Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down: go on at another one")


@dataclass(frozen=True, slots=True)
class Gate:
    """Entrance of a server: the credentials of its ports, and the checks and limits of each call.

    Attributes:
        credentials: TLS of the port; None for plain text.
        mtls_address: HOST:PORT of a second port that requires client certificates, as grpcio cannot make them optional.
        mtls_credentials: TLS of the second port.
        admit: function that admits or refuses a call before its request is parsed; the default admits every call.
        open_span: function that opens a tracing span for each call of this project's services.
        stall_timeout_s: seconds that a write of this project's services may wait for a peer that reads nothing.
    """

    credentials: grpc.ServerCredentials | None = None
    mtls_address: str | None = None
    mtls_credentials: grpc.ServerCredentials | None = None
    admit: Admit = lambda method, headers, names, peer: ((), nullcontext())
    open_span: OpenSpan = lambda name, headers, attributes: nullcontext()
    stall_timeout_s: float = math.inf


OPEN = Gate()
AGAIN_S = 1.0
"""Seconds until a retry, for a call that was ended since too many waited."""


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor that puts the same steps around every method of a server, gRPC's own services included.

    The steps of a call, in order:

    1. `Gate.admit` admits the call, before its request is parsed.
    2. The guard reads the first message, for at most FIRST_MESSAGE_S.
    3. For this project's services it opens a span. From here on, `move` ends the call if its client can continue at
       another server.
    4. The handler runs.
    5. If any step failed, the call ends with the status of the failure.

    A handler is a coroutine on the event loop and never touches gRPC's context:

        async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:      # one request, many responses
            async for event in self._completer.complete(completion_from_message(request)):
                await call.write(event_to_message(event))

        async def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:   # one of each
            return card_to_message(self._card)

    A method that streams requests gets `call.messages()` in place of the request. A handler fails by raising an
    exception. A StatusError ends the call with its own status, any other with the result of `status_of`. If that is
    None, the status is INTERNAL and the failure is logged. A handler is cancelled when the client leaves. `call.write`
    raises StatusError (ABORTED) if the client reads nothing for `Gate.stall_timeout_s`.

    Args:
        status_of: function from exceptions of handlers to statuses; None for unexpected ones.
        max_bytes: limit of a request message in bytes, by service name. Services not named here, which are health and
            reflection, have the limit MAX_HEALTH_REQUEST_BYTES.
        gate: admission, spans and limits of the server's calls.
    """

    def __init__(self, status_of: StatusOf, max_bytes: Mapping[str, int], gate: Gate) -> None:
        self._status_of = status_of
        self._max_bytes = max_bytes
        self._gate = gate
        self._waiting: dict[Limit, None] = {}  # calls that wait for their first message
        self._movable: dict[Limit, None] = {}
        self._moves = False
        self._methods: dict[str, Any] = {}

    def move(self) -> None:
        """Make every call, now and later, end if its client can continue the request at another server."""
        self._moves = True
        for limit in [*self._movable]:
            limit.end(_MOVED)

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the guarded method of a call. gRPC calls this for each call; a method is wrapped only once."""
        method, name = await continuation(handler_call_details), handler_call_details.method
        if method is None and name in GONE:
            return grpc.stream_stream_rpc_method_handler(_refuse_gone)
        if method is not None and name not in self._methods:
            self._methods[name] = self._guarded(method, name)
        return self._methods.get(name)

    def _guarded(self, method: Any, name: str) -> Any:
        """Return the method with the guard around it, in the form of a method that streams in both directions.

        If a method took a single message, gRPC itself would read it, and would wait for it without a limit.

        Args:
            method: gRPC's `RpcMethodHandler`.
            name: full name of the method, such as /specdec.v1.GenerationService/Generate.
        """
        handler = _handler(method)

        async def guard(_: object, context: Context) -> None:
            try:
                headers = _headers(context)
                trailers, admitted = self._gate.admit(name, headers, _names(context), peer_of(context))
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

        gRPC itself would let any number of calls wait without a limit. Each keeps some 20 KB and a hundred objects, and
        every garbage collection looks at them while no call is served. Here a call waits for at most `FIRST_MESSAGE_S`,
        and at most `MAX_WAITING` calls wait: one more ends the call that has waited longest.
        """
        if len(self._waiting) >= MAX_WAITING:
            text = f"{MAX_WAITING} later calls wait for their first message too"
            next(iter(self._waiting)).end(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, text, AGAIN_S))
        late = Status(grpc.StatusCode.DEADLINE_EXCEEDED, f"no first message came for {FIRST_MESSAGE_S:g} s")
        async with Limit(late, FIRST_MESSAGE_S, self._waiting):
            return await context.read()

    @asynccontextmanager
    async def _served(self, name: str, headers: Headers) -> AsyncGenerator[float, None]:
        """Run the block, in which a handler runs, within a span and limits if the service is this project's.

        Args:
            name: full name of the method, such as /specdec.v1.GenerationService/Generate.
            headers: headers of the call.

        Yields:
            The seconds that each of the call's writes may take.
        """
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
        if isinstance(exc, grpc.aio.InternalError | grpc.aio.UsageError):  # a write or read after the peer left
            return Status(grpc.StatusCode.CANCELLED, "the client has left")
        status = self._status_of(exc)
        if status is None:
            logger.error("a call failed unexpectedly", exc_info=exc)
            return Status(grpc.StatusCode.INTERNAL, "unexpected failure; the server's log has the cause")
        return status


async def _refuse_gone(_: object, context: Context) -> None:
    """End a call of a method in `GONE` as UNIMPLEMENTED, with the message that says what to call instead."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "; ".join(GONE.values()))


def _handler(method: Any) -> Handler:
    """Return the handler of a method. If it yields its responses, as reflection's does, wrap it to write them.

    Args:
        method: gRPC's `RpcMethodHandler`.
    """
    handler: Any = method.unary_unary or method.unary_stream or method.stream_unary or method.stream_stream
    if not inspect.isasyncgenfunction(handler):
        return handler  # type: ignore[no-any-return]

    async def writing(request: Any, call: Call) -> None:
        async for response in handler(request, call):
            await call.write(response)

    return writing


def _headers(context: Context) -> Headers:
    """Return the text headers of a call.

    Raises:
        StatusError: there are two headers with a token: a proxy may have checked another one than would be used here.
    """
    pairs = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    if [key for key, _ in pairs].count(AUTHORIZATION) > 1:
        raise StatusError(Status(grpc.StatusCode.INVALID_ARGUMENT, f"more than one {AUTHORIZATION} header came"))
    return dict(pairs)


def _names(context: Context) -> Sequence[str] | None:
    """Return the names in the client's certificate; None if the port takes no certificates."""
    certificates = context.auth_context().get("x509_pem_cert")
    return names_in(next(iter(certificates))) if certificates else None


def _limited(parse: Callable[[bytes], Any], method: str, max_bytes: int) -> Callable[[bytes], Any]:
    """Return a parser that accepts messages of at most `max_bytes` bytes, and parses them by `parse`.

    Parsing a message full of empty submessages takes a hundred times its size in memory, and seconds in which no other
    call is served.

    Args:
        method: name of the call's method, for the log.

    Raises:
        StatusError: raised by the parser if the message is too long, or malformed.
    """

    def limited(data: bytes) -> Any:
        if len(data) <= max_bytes:
            try:
                return parse(data)
            except DecodeError:
                fault = f"{len(data)} bytes that are not a message of this method"
        else:
            fault = f"a message of {len(data)} bytes exceeds the limit of {max_bytes}"
        logger.info("%s: %s", method, fault)
        raise StatusError(Status(grpc.StatusCode.INVALID_ARGUMENT, fault))

    return limited


async def _abort(context: Context, status: Status) -> None:
    """End a call with a status, or without one if the peer does not read."""
    message = " ".join(status.message.split())[:MAX_MESSAGE_CHARACTERS]  # it may quote what a client sent
    trailers = (*(context.trailing_metadata() or ()), *status.trailing_metadata())  # abort replaces what was set
    abort = asyncio.ensure_future(context.abort(status.code, message, trailers))
    abort.add_done_callback(lambda task: task.cancelled() or task.exception())  # it always raises
    await asyncio.wait([abort], timeout=ABORT_S)
    if not abort.done() or isinstance(abort.exception(), grpc.aio.InternalError):
        # The peer did not read an earlier write, so the status cannot be sent. Ending without one resets the stream.
        abort.cancel()
        raise asyncio.CancelledError
    asyncio.get_running_loop().call_soon(_forget, abort.exception())
    abort.result()


def _forget(error: BaseException | None) -> None:
    """Release the stack frames of a failed call's error.

    gRPC's state of a call refers to its error, and the error's frames refer to that state. Thousands of such cycles
    would wait for a full garbage collection, which stops the process until all are freed.
    """
    if error is not None:
        error.__traceback__ = error.__context__ = None
