"""Our exceptions as gRPC statuses, and back. The only such table."""

from __future__ import annotations

import grpc

from grpc_comm.channel import UnreachableError
from grpc_comm.errors import Status, status_of
from inference import errors

_CODES: dict[type[errors.SpecDecError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.IncompatibleDraftError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
_ERRORS = {code: error for error, code in _CODES.items()}
_FAILED_WRITE = "Internal error from Core"  # what grpcio makes of a write that the connection did not take


def to_status(error: Exception) -> Status | None:
    """Status of one of our exceptions; None for anything else."""
    code = _CODES.get(type(error))  # type: ignore[arg-type]
    if code is None:
        return None
    return Status(code, str(error), getattr(error, "retry_after_s", None))


def code_name(error: Exception) -> str:
    """The status name of an exception, as JSON output shows it."""
    status = to_status(error)
    return "INTERNAL" if status is None else status.code.name


def from_rpc_error(error: grpc.RpcError, address: str) -> errors.SpecDecError:
    """The exception that a failed call to `address` stands for."""
    status = status_of(error)
    message = f"{address}: {status.message}"
    if status.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.CapacityError(message, retry_after_s=status.retry_after_s or 1.0)
    if status.code == grpc.StatusCode.UNIMPLEMENTED:
        return errors.NotFoundError(f"{message} (is this another kind of server?)")
    if status.code == grpc.StatusCode.INTERNAL and status.message == _FAILED_WRITE:
        return errors.UnavailableError(f"{address}: the connection broke while a message was being sent")
    if status.code == grpc.StatusCode.CANCELLED:
        return errors.UnavailableError(f"{message} (the server cancelled the call)")
    return _ERRORS.get(status.code, errors.InternalError)(message)


def from_unreachable(error: UnreachableError) -> errors.SpecDecError:
    return errors.UnavailableError(str(error))
