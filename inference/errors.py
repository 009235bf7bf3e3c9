"""The project's exceptions. Messages name the offending value and the limit.

They know nothing of gRPC or HTTP; the workers map them.
"""

from __future__ import annotations


class SpecDecError(Exception):
    """Root of every error this project raises on purpose.

    Attributes:
        message: one line that names the value and the limit.
        address: HOST:PORT of the server that said so; None: this process.
        is_final: several servers in a row broke over the request, which no other one should be asked.
    """

    is_final = False

    def __init__(self, message: str, *, address: str | None = None) -> None:
        super().__init__(message if address is None else f"{address}: {message}")
        self.message = message
        self.address = address


class ConfigError(SpecDecError):
    """A flag, file or checkpoint cannot be used as given; found before anything is served."""


class UnsupportedModelError(ConfigError):
    """The architecture cannot be served by a backend of slots and positions: its cache is not plain keys and values."""


class RequestError(SpecDecError):
    """One request is at fault; the server goes on."""


class InvalidRequestError(RequestError):
    """A value of the request is outside its range.

    Attributes:
        field: the one at fault, as GenerateRequest and its messages call it; None: it is no single one.
    """

    def __init__(self, message: str, *, field: str | None = None, address: str | None = None) -> None:
        super().__init__(message, address=address)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for one output token in the model's context."""


class IncompatibleDraftError(RequestError):
    """Draft and target disagree on vocabulary, tokenizer or protocol version."""


class NotFoundError(RequestError):
    """The request names something that does not exist here, such as a session or a model."""


class OtherServerError(RequestError):
    """What answers at the address has no such method: it is another kind of server."""


class UnauthenticatedError(RequestError):
    """No token or certificate came with the request, or none that is known here."""


class ForbiddenError(RequestError):
    """Whoever asks is known, and may not do this."""


class CapacityError(SpecDecError):
    """Every slot and queue place is taken.

    Attributes:
        retry_after_s: seconds after which a retry has a fair chance.
    """

    def __init__(self, message: str, *, retry_after_s: float, address: str | None = None) -> None:
        super().__init__(message, address=address)
        self.retry_after_s = retry_after_s


class UnavailableError(SpecDecError):
    """The peer cannot be reached, or this server is shutting down."""


class HandshakeError(UnavailableError):
    """There is no TLS with the peer: a certificate is not trusted, has expired, or is missing. A retry is no help."""


class DeadlineError(SpecDecError):
    """The time allowed for a request or a wait is over."""


class InternalError(SpecDecError):
    """A fault of ours, logged once where it happened."""
