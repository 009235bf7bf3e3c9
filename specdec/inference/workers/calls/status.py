"""Conversion of this project's exceptions to gRPC statuses and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from specdec.grpc_comm.channel import HandshakeError, UnreachableError
from specdec.grpc_comm.errors import Status, StatusError, is_cancelled, status_of
from specdec.inference import errors

logger = logging.getLogger(__name__)

ErrorT = TypeVar("ErrorT", bound=Exception)
_CODES: dict[type[errors.SpecDecError], grpc.StatusCode] = {
    errors.ContextLengthError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.IncompatibleDraftError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OtherServerError: grpc.StatusCode.UNAVAILABLE,
    errors.HandshakeError: grpc.StatusCode.UNAVAILABLE,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
_ERRORS = {code: error for error, code in _CODES.items()}  # of several with one code, the last
_REASONS: dict[type[errors.SpecDecError], str] = {errors.ContextLengthError: "CONTEXT_LENGTH_EXCEEDED"}
_BREAKS_SERVERS = "BREAKS_SERVERS"
_INVALID = {"CONTEXT_LENGTH_EXCEEDED": errors.ContextLengthError}
_OF_A_PROXY = "http2 header with status"  # gRPC's words for HTTP's own 404; a gRPC server answers 200 and a grpc-status
_FAILED_WRITE = "Internal error from Core"  # what grpcio makes of a write that the connection did not take
_NO_HANDSHAKE = "handshake failed"  # in the middle of gRPC's message, which ends with OpenSSL's

MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0
"""Least and greatest delay in seconds that is taken from the refusal of a full server; a number outside, which a server
may send, is changed to the nearer of the two."""
_TOO_LONG = "message larger than max"  # gRPC's own refusal; no retry makes the message shorter
_ANSWER_TOO_LONG = "CLIENT: Received message larger than max"  # it names the side that refuses


def to_status(error: Exception) -> Status | None:
    """Return the gRPC status that an exception of this project becomes; None for any other exception."""
    if isinstance(error, StatusError):
        return error.status
    code = _CODES.get(type(error))  # type: ignore[arg-type]
    if code is None or not isinstance(error, errors.SpecDecError):
        return None
    retry_after_s = error.retry_after_s if isinstance(error, errors.CapacityError) else None
    field = error.field if isinstance(error, errors.InvalidRequestError) else None
    reason = _BREAKS_SERVERS if error.is_final else _REASONS.get(type(error))
    return Status(code, error.message, retry_after_s, field, error.address, reason)


def for_client(error: ErrorT) -> ErrorT | errors.UnavailableError:
    """Return the exception to report to a client: `error`, unless another server refused this server's credentials.

    The client is not to blame for a refusal like that: it gets an UnavailableError, and the log has the reason.
    """
    if isinstance(error, errors.UnauthenticatedError | errors.ForbiddenError) and error.address is not None:
        logger.error("refused by the upstream server: %s", error)
        return errors.UnavailableError("the upstream server does not take its credentials")
    return error


def code_name(error: Exception) -> str:
    """Return the name of the gRPC status that an exception becomes, such as UNAVAILABLE; INTERNAL if it is unknown."""
    status = to_status(error)
    return "INTERNAL" if status is None else status.code.name


@contextmanager
def calls_to(address: str) -> Generator[None, None, None]:
    """Raise failures of gRPC calls in the block, to the server at `address` (HOST:PORT), as this project's exceptions.

    Raises:
        SpecDecError: a call failed; its class depends on the gRPC status.
    """
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        raise from_rpc_error(exc, address) from exc
    except asyncio.CancelledError as exc:
        if is_cancelled():
            raise
        raise errors.UnavailableError("the channel was closed under the call", address=address) from exc
    except HandshakeError as exc:
        raise errors.HandshakeError(str(exc)) from exc
    except UnreachableError as exc:
        raise errors.UnavailableError(str(exc)) from exc


def from_rpc_error(error: grpc.RpcError, address: str) -> errors.SpecDecError:
    """Return this project's exception for a failed gRPC call to the server at `address`."""
    status = status_of(error)
    found = _from_status(status, address)
    found.is_final = status.reason == _BREAKS_SERVERS
    return found


def _from_status(status: Status, address: str) -> errors.SpecDecError:
    message, code = status.message, status.code
    where = address if status.address is None else f"{address}: {status.address}"
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        invalid = _INVALID.get(status.reason or "", errors.InvalidRequestError)
        return invalid(message, field=status.field, address=where)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and _ANSWER_TOO_LONG in message:
        fault = f"a message of the answer is too long here ({message}): ask for fewer log-probabilities, or for no echo"
        return errors.InvalidRequestError(fault, address=where)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LONG in message:
        return errors.ContextLengthError(f"the request is too long: {message}", field="prompt", address=where)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_after_s = min(max(status.retry_after_s or 1.0, MIN_RETRY_S), MAX_RETRY_S)
        return errors.CapacityError(message, retry_after_s=retry_after_s, address=where)
    if code == grpc.StatusCode.UNAVAILABLE and _NO_HANDSHAKE in message.lower():
        return errors.HandshakeError(message.rpartition("OPENSSL_internal:")[2], address=where)
    if code == grpc.StatusCode.UNIMPLEMENTED and _OF_A_PROXY in message:  # it knows of no server at the moment
        return errors.UnavailableError(f"a proxy answered: {message}", address=where)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return errors.OtherServerError(f"{message} (is this another kind of server?)", address=where)
    if code == grpc.StatusCode.INTERNAL and message == _FAILED_WRITE:
        return errors.UnavailableError("the connection broke while a message was being sent", address=where)
    if code == grpc.StatusCode.ABORTED:  # by a peer that found us too slow
        return errors.UnavailableError(message, address=where)
    if code == grpc.StatusCode.CANCELLED:
        return errors.UnavailableError(f"{message} (the server cancelled the call)", address=where)
    return _ERRORS.get(code, errors.InternalError)(message, address=where)
