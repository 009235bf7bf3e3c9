"""Errors that the library raises, for users to catch; all derive from `SpecDecError`."""

from __future__ import annotations

from specdec.inference.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    ForbiddenError,
    HandshakeError,
    IncompatibleDraftError,
    InternalError,
    InvalidRequestError,
    MissingPackageError,
    NotFoundError,
    OtherServerError,
    RequestError,
    RoomError,
    SpecDecError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedModelError,
)

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContextLengthError",
    "DeadlineError",
    "ForbiddenError",
    "HandshakeError",
    "IncompatibleDraftError",
    "InternalError",
    "InvalidRequestError",
    "MissingPackageError",
    "NotFoundError",
    "OtherServerError",
    "RequestError",
    "RoomError",
    "SpecDecError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedModelError",
]
