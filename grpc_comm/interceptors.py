"""What stands around handlers: who may call them, what they may be sent, and what becomes of their exceptions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from grpc_comm.errors import Status, StatusError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""Its messages are typed where they are converted; here they are anything."""

logger = logging.getLogger(__name__)

StatusOf = Callable[[Exception], Status | None]
Handler = Callable[[Any, Context], Awaitable[Any]]
MAX_MESSAGE_CHARACTERS = 2000
"""Of a status; above 16 kB of trailers a client would read RESOURCE_EXHAUSTED, which means something else."""
MAX_NAME_BYTES = 64 * 1024
"""Of a request of health or reflection."""
ABORT_S = 1.0
"""How long a status waits for a peer that does not read; then the call is dropped without one."""


def deadline_of(context: Context) -> float | None:
    """The event loop's time at which a call is over; None: it has no such time."""
    left_s = context.time_remaining()
    return None if left_s is None else asyncio.get_running_loop().time() + left_s


class MethodInterceptor:
    """Puts something in the place of what a method has: its handler, its parser."""

    def replaced(self, method: Any, name: str) -> Any:
        """A `grpc.RpcMethodHandler` instead of another, of the method of this full name."""
        raise NotImplementedError


class Interceptors(grpc.aio.ServerInterceptor):
    """Several, the outermost first, in the place of one.

    gRPC asks its interceptors anew at every call, one behind the other; ours give a method the same whoever calls it.
    """

    def __init__(self, *interceptors: MethodInterceptor) -> None:
        self._interceptors = interceptors
        self._replaced: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        method, name = await continuation(handler_call_details), handler_call_details.method
        if method is None:
            return None
        if name not in self._replaced:
            for interceptor in reversed(self._interceptors):
                method = interceptor.replaced(method, name)
            self._replaced[name] = method
        return self._replaced[name]


class HandlerInterceptor(MethodInterceptor):
    """Wraps the handlers of our services: coroutines that write their responses themselves."""

    def covers(self, name: str) -> bool:
        """Whether a method's handler is wrapped: not those of gRPC's own services, health and reflection."""
        return not name.startswith("/grpc.")

    def wrap(self, behavior: Handler, name: str) -> Handler:
        """Return a handler that does something around `behavior`."""
        raise NotImplementedError

    def replaced(self, method: Any, name: str) -> Any:
        """See `MethodInterceptor`."""
        if not self.covers(name):
            return method
        kind = kind_of(method)
        return method._replace(**{kind: self.wrap(getattr(method, kind), name)})


def kind_of(method: Any) -> str:
    """Where a method has its handler."""
    arity = {False: "unary", True: "stream"}
    return f"{arity[method.request_streaming]}_{arity[method.response_streaming]}"


class ErrorInterceptor(HandlerInterceptor):
    """Aborts a failed call with the status that `status_of` gives its exception, and with INTERNAL if it gives none."""

    def __init__(self, status_of: StatusOf) -> None:
        self._status_of = status_of

    def covers(self, name: str) -> bool:
        """All of them: what is no message comes to health and reflection too."""
        return True

    def wrap(self, behavior: Handler, name: str) -> Handler:
        """See `HandlerInterceptor`."""

        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as exc:
                await self._abort(context, exc)

        return guarded

    async def _abort(self, context: Context, exc: Exception) -> None:
        status = self._status(exc)
        message = " ".join(status.message.split())[:MAX_MESSAGE_CHARACTERS]  # it may quote what a client sent
        trailers = (*(context.trailing_metadata() or ()), *status.trailing_metadata())  # abort replaces what was set
        abort = asyncio.ensure_future(context.abort(status.code, message, trailers))
        abort.add_done_callback(lambda task: task.cancelled() or task.exception())  # it always raises
        await asyncio.wait([abort], timeout=ABORT_S)
        if not abort.done() or isinstance(abort.exception(), grpc.aio.InternalError):
            # It waits, or is refused, behind a write that nobody reads. Leaving without a status resets the stream.
            abort.cancel()
            raise asyncio.CancelledError
        asyncio.get_running_loop().call_soon(_forget, abort.exception())
        abort.result()

    def _status(self, exc: Exception) -> Status:
        if isinstance(exc, StatusError):
            return exc.status
        if isinstance(exc, grpc.aio.InternalError | grpc.aio.UsageError):  # a write or read that nobody is there for
            return Status(grpc.StatusCode.CANCELLED, "the client has left")
        status = self._status_of(exc)
        if status is None:
            logger.error("a call failed unexpectedly", exc_info=exc)
            return Status(grpc.StatusCode.INTERNAL, "unexpected failure; the server's log has the cause")
        return status


def _forget(error: BaseException | None) -> None:
    """Let go of the frames that a call failed in.

    gRPC's state of a call keeps its error, and so they keep each other: thousands would wait for a full garbage
    collection, which stops the process for as long as it takes to end them all.
    """
    if error is not None:
        error.__traceback__ = error.__context__ = None


REQUEST_ID = "x-request-id"
Admit = Callable[[str, Mapping[str, str], Sequence[str] | None], AbstractContextManager[str]]
"""(method, headers, names in the client's certificate if the port takes one) -> around the call, with its id; or a
StatusError."""


class GateInterceptor(MethodInterceptor):
    """Asks who may come in, for methods of all services, before anything of a request is parsed."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit

    def replaced(self, method: Any, name: str) -> Any:
        """See `MethodInterceptor`."""
        kind = kind_of(method)
        return method._replace(**{kind: self._gated(name, getattr(method, kind))})

    def _gated(self, name: str, behavior: Handler) -> Handler:
        async def gated(request: Any, context: Context) -> Any:
            try:
                admitted = self._admit(name, texts(context.invocation_metadata()), _names(context))
            except StatusError as exc:
                context.set_trailing_metadata(((REQUEST_ID, exc.request_id),))
                raise
            with admitted as request_id:
                context.set_trailing_metadata(((REQUEST_ID, request_id),))
                return await behavior(request, context)

        return gated


def texts(metadata: Any) -> dict[str, str]:
    """Metadata that is text."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _names(context: Context) -> Sequence[str] | None:
    """Names in the client's certificate; None: the port takes none."""
    peer = context.auth_context()
    if "x509_pem_cert" not in peer:
        return None
    return [name.decode("utf-8", "replace") for name in peer.get("x509_subject_alternative_name", ())]


class RequestLimit(MethodInterceptor):
    """Refuses request messages above their service's limit before they are parsed, and what is no message at all.

    A message of empty submessages takes a hundred times its size and seconds to read, in which nobody else is served.

    Args:
        max_bytes: of one message, by service name; those of other services, health and reflection, hold a name.
    """

    def __init__(self, max_bytes: Mapping[str, int]) -> None:
        self._max_bytes = max_bytes

    def replaced(self, method: Any, name: str) -> Any:
        """See `MethodInterceptor`."""
        max_bytes = self._max_bytes.get(name.split("/")[1], MAX_NAME_BYTES)
        return method._replace(request_deserializer=_limited(method.request_deserializer, name, max_bytes))


def _limited(parse: Callable[[bytes], Any], method: str, max_bytes: int) -> Callable[[bytes], Any]:
    """The parser, for messages up to a length.

    Raises:
        StatusError: the message is longer, or is none.
    """

    def limited(data: bytes) -> Any:
        if len(data) > max_bytes:
            raise _refused(method, f"a message of {len(data)} bytes exceeds the limit of {max_bytes}")
        try:
            return parse(data)
        except DecodeError:
            raise _refused(method, f"{len(data)} bytes that are no message of this method") from None

    return limited


def _refused(method: str, message: str) -> StatusError:
    logger.info("%s: %s", method, message)
    return StatusError(Status(grpc.StatusCode.INVALID_ARGUMENT, message))
