"""The project's exceptions. Messages name the offending value and the limit.

They know nothing of gRPC or HTTP; the workers map them.

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


class SpecDecError(Exception):
    """Root of every error that this project raises on purpose.

    Attributes:
        message: one line that names the value and the limit.
        address: HOST:PORT of the server that reported the error; None: this process.
        is_final: True if several servers in a row failed on the request, so that no other server should be tried.
    """

    is_final = False

    def __init__(self, message: str, *, address: str | None = None) -> None:
        super().__init__(message if address is None else f"{address}: {message}")
        self.message = message
        self.address = address


class ConfigError(SpecDecError):
    """Flag, file or checkpoint that cannot be used; found before anything is served."""


class MissingPackageError(ConfigError):
    """Missing package: clients need only the base packages, servers also those of the extra `server`.

    Clients of other servers need those of the extra `endpoints`.
    """

    def __init__(self, what: str, package: str | None) -> None:
        extra = "endpoints" if package == "aiohttp" else "server"
        how = f"`pip install 'specdec-serve[{extra}]'`; in a checkout `pip install '.[{extra}]'`"
        super().__init__(f"{what} needs the extra `{extra}` ({how}): package {package} is not installed")


class RoomError(ConfigError):
    """Setting that asks for more memory than the machine has, so that no backend can serve it."""


class UnsupportedModelError(ConfigError):
    """Model of a kind that a backend cannot run: its family, its layers or its attention."""


class RequestError(SpecDecError):
    """Fault of one request, which does not affect other requests.

    Attributes:
        caller_name: name that a refused caller has in the auth file; empty if it is not known.
    """

    caller_name = ""


class InvalidRequestError(RequestError):
    """Request with a value that is malformed, out of range or not supported here.

    Attributes:
        field: field at fault, by its name in GenerateRequest and its messages; None: no single field is at fault.
    """

    def __init__(self, message: str, *, field: str | None = None, address: str | None = None) -> None:
        super().__init__(message, address=address)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Prompt too long for a message, or for the model's context, which must hold one output token too."""


class IncompatibleDraftError(RequestError):
    """Disagreement of draft and target on tokenizer or protocol, or of two servers on the model of a resumed answer."""


class NotFoundError(RequestError):
    """Request for something that does not exist here, such as an adapter."""


class OtherServerError(RequestError):
    """Call of a method that the server does not have, because it is a server of another kind."""


class UnauthenticatedError(RequestError):
    """Request without a token or certificate that this server knows."""


class ForbiddenError(RequestError):
    """Request for which its known caller lacks the right."""


class CapacityError(SpecDecError):
    """Refusal for lack of room: slots and queue are full, or a limit of the caller or the server is reached.

    Attributes:
        retry_after_s: seconds after which a retry has a fair chance.
    """

    def __init__(self, message: str, *, retry_after_s: float, address: str | None = None) -> None:
        super().__init__(message, address=address)
        self.retry_after_s = retry_after_s


class UnavailableError(SpecDecError):
    """Server that gives no valid answer: it cannot be reached, shuts down, has ended, or sends a faulty one."""


class HandshakeError(UnavailableError):
    """TLS failure: a certificate is not trusted, has expired, or is missing. A retry does not help."""


class DeadlineError(SpecDecError):
    """End of the time that a request or a wait may take."""


class InternalError(SpecDecError):
    """Fault of the server or its model, not of the request; logged once where it happened."""
