"""Exceptions of this project. Their messages name the wrong value and the limit.

They know nothing of gRPC or HTTP, whose status is chosen in workers/calls/status.py and gateway/answers/errors.py.

    SpecDecError
      ConfigError: found before anything is served
        MissingPackageError, RoomError, UnsupportedModelError
      RequestError: the fault of one request
        InvalidRequestError: a value that is not valid
          ContextLengthError
        IncompatibleDraftError, NotFoundError, OtherServerError, UnauthenticatedError, ForbiddenError
      CapacityError: ask again later
      UnavailableError: ask another server
        HandshakeError: no retry helps
      DeadlineError, InternalError
"""

from __future__ import annotations


def cut(text: str, limit: int) -> str:
    """Return a text for a message, cut to `limit` characters and then marked by "..." if it is longer."""
    return text if len(text) <= limit else f"{text[:limit]}..."


class SpecDecError(Exception):
    """Base class of all errors that this project raises on purpose.

    Attributes:
        message: one line that names the value and the limit.
        address: HOST:PORT of the server that reported the error; None if this process found it.
        is_final: True if several servers in a row failed by the request, so that no other server may be tried.
    """

    is_final = False

    def __init__(self, message: str, *, address: str | None = None) -> None:
        super().__init__(message if address is None else f"{address}: {message}")
        self.message = message
        self.address = address


class ConfigError(SpecDecError):
    """Error of a flag, file or checkpoint that cannot be used, found before anything is served."""


class MissingPackageError(ConfigError):
    """Error of a package that is not installed, with the name of the extra that has it.

    Clients need only the base packages, servers also those of the extra `server`, and clients of other projects'
    servers those of the extra `endpoints`.

    Args:
        what: what needs the package.
        package: name of the package.
    """

    def __init__(self, what: str, package: str | None) -> None:
        extra = "endpoints" if package == "aiohttp" else "server"
        how = f"`pip install 'specdec-serve[{extra}]'`; in a checkout `pip install '.[{extra}]'`"
        super().__init__(f"{what} needs the extra `{extra}` ({how}): package {package} is not installed")


class RoomError(ConfigError):
    """Error of settings that ask for more memory than the machine has, whichever backend is taken."""


class UnsupportedModelError(ConfigError):
    """Error of a model that a backend cannot run because of its family, its layers or its attention."""


class RequestError(SpecDecError):
    """Error that is the fault of one request, and does not affect other requests.

    Attributes:
        caller_name: name that a refused caller has in the auth file; empty if it is not known.
    """

    caller_name = ""


class InvalidRequestError(RequestError):
    """Error of a request with a value that is malformed, out of range or not supported by this server.

    Attributes:
        field: name of the field at fault in the gRPC message GenerateRequest, or in a message within it; None: no
            single field is at fault.
    """

    def __init__(self, message: str, *, field: str | None = None, address: str | None = None) -> None:
        super().__init__(message, address=address)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Error of a prompt too long for a gRPC message, or for the model's context with one output token behind it."""


class IncompatibleDraftError(RequestError):
    """Error of a draft and a target, or of two servers of one answer, that do not fit each other.

    A draft and a target need one vocabulary and one protocol; an answer can be continued only by the same model.
    """


class NotFoundError(RequestError):
    """Error of a request for something that this server does not have, such as an adapter."""


class OtherServerError(RequestError):
    """Error of a call of a gRPC method that the server does not have, since it is a server of another kind."""


class UnauthenticatedError(RequestError):
    """Error of a request without a token or certificate that the server knows."""


class ForbiddenError(RequestError):
    """Error of a request that its caller, whom the server knows, has no right to make."""


class CapacityError(SpecDecError):
    """Error of a request for which there is no room now: slots and queue are full, or a limit is reached.

    Attributes:
        retry_after_s: seconds after which a retry has a fair chance.
    """

    def __init__(self, message: str, *, retry_after_s: float, address: str | None = None) -> None:
        super().__init__(message, address=address)
        self.retry_after_s = retry_after_s


class UnavailableError(SpecDecError):
    """Error of a server that gives no valid answer: it cannot be reached, shuts down, has ended, or is faulty."""


class HandshakeError(UnavailableError):
    """Error of a TLS handshake: a certificate is not trusted, has expired, or is missing. A retry does not help."""


class DeadlineError(SpecDecError):
    """Error of a request or a wait that has taken as long as it may."""


class InternalError(SpecDecError):
    """Error that is the fault of the server or its model, not of the request; it is logged once, where it happened."""
