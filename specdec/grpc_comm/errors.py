"""Statuses of failed calls: a code, a message, and details for the caller, such as seconds until a retry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "specdec"


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a failed call.

    Attributes:
        code: the gRPC status.
        message: one line that names the value and the limit.
        retry_after_s: seconds until a retry has a fair chance; None if it has none or that is unknown.
        field: the field of the request that is at fault; None if no field alone is.
        reason: name of the fault, for programs; None if only the message describes it.
        address: HOST:PORT of the upstream server that failed; None if the called server did.
    """

    code: grpc.StatusCode
    message: str
    retry_after_s: float | None = None
    field: str | None = None
    address: str | None = None
    reason: str | None = None

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata that carries the details, as a google.rpc.Status; empty if there are no details."""
        status = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=self.message)
        for detail in self._details():
            status.details.add().Pack(detail)
        return ((_DETAILS_KEY, status.SerializeToString()),) if status.details else ()

    def _details(self) -> Iterator[Message]:
        if self.retry_after_s is not None:
            duration = duration_pb2.Duration()
            duration.FromNanoseconds(round(self.retry_after_s * 1e9))
            yield error_details_pb2.RetryInfo(retry_delay=duration)
        if self.field is not None or self.reason is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field or "", description=self.message, reason=self.reason
            )
            yield error_details_pb2.BadRequest(field_violations=[violation])
        if self.address is not None:
            metadata = {"address": self.address}
            yield error_details_pb2.ErrorInfo(reason=self.code.name, domain=_DOMAIN, metadata=metadata)


class StatusError(Exception):
    """Failure that ends a gRPC call with exactly the given status, such as a refusal before the handler runs."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status


def is_cancelled() -> bool:
    """Return whether the current task is cancelled. A CancelledError may also come from a closed call or channel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def status_of(error: grpc.RpcError) -> Status:
    """Return the status that a call failed with, with the details that `Status.trailing_metadata` wrote."""
    retry, bad, info = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    found = {type(kind) for detail in _details(error) for kind in (retry, bad, info) if detail.Unpack(kind)}
    return Status(
        error.code(),
        error.details() or "",
        float(retry.retry_delay.ToNanoseconds() / 1e9) if type(retry) in found else None,
        bad.field_violations[0].field or None if bad.field_violations else None,
        info.metadata["address"] if info.domain == _DOMAIN and "address" in info.metadata else None,
        bad.field_violations[0].reason or None if bad.field_violations else None,
    )


def _details(error: grpc.RpcError) -> Iterator[any_pb2.Any]:
    metadata: Any = error.trailing_metadata() or ()  # an iterable of pairs, unlike in the stubs
    for key, value in metadata:
        if key == _DETAILS_KEY:
            with suppress(DecodeError):  # the details are a proxy's, or a hostile peer's
                yield from status_pb2.Status.FromString(value).details
