"""Statuses of failed calls: a code, a message, and a retry hint where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Status:
    """How a call fails.

    Attributes:
        code: the gRPC status.
        message: one line that names the value and the limit.
        retry_after_s: seconds until a retry has a fair chance; None where it has none or nobody knows.
    """

    code: grpc.StatusCode
    message: str
    retry_after_s: float | None = None

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """google.rpc.Status with RetryInfo, if there is a hint."""
        if self.retry_after_s is None:
            return ()
        duration = duration_pb2.Duration(nanos=0)
        duration.FromNanoseconds(round(self.retry_after_s * 1e9))
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration))
        code = code_pb2.Code.Value(self.code.name)
        status = status_pb2.Status(code=code, message=self.message, details=[detail])
        return ((_DETAILS_KEY, status.SerializeToString()),)


def status_of(error: grpc.RpcError) -> Status:
    """The status a failed call came back with."""
    code, message = error.code(), error.details() or ""
    return Status(code, message, _retry_after_s(error))


def _retry_after_s(error: grpc.RpcError) -> float | None:
    metadata: Any = error.trailing_metadata() or ()  # an iterable of pairs, whatever the stubs say
    for key, value in metadata:
        if key == _DETAILS_KEY:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None
