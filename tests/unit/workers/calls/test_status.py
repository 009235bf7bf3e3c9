"""Exceptions become gRPC statuses, and at the client exceptions of the same class, with message and time to retry."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import Metadata

from specdec.grpc_comm.errors import Status
from specdec.inference import errors
from specdec.inference.gateway.answers.errors import from_error
from specdec.inference.workers.calls.status import code_name, for_client, from_rpc_error, to_status

SAME_ON_BOTH_SIDES = [
    errors.InvalidRequestError("a"),
    errors.ContextLengthError("a"),
    errors.IncompatibleDraftError("a"),
    errors.NotFoundError("a"),
    errors.UnauthenticatedError("a"),
    errors.ForbiddenError("a"),
    errors.CapacityError("a", retry_after_s=2.5),
    errors.UnavailableError("a"),
    errors.DeadlineError("a"),
    errors.InternalError("a"),
]


def failed_call(status: Status) -> grpc.aio.AioRpcError:
    trailing = Metadata(*status.trailing_metadata())
    return grpc.aio.AioRpcError(status.code, Metadata(), trailing, details=status.message)


@pytest.mark.parametrize("error", SAME_ON_BOTH_SIDES, ids=lambda error: type(error).__name__)
def test_errors_keep_class_message_and_details_over_grpc(error: errors.SpecDecError) -> None:
    status = to_status(error)
    assert status is not None
    back = from_rpc_error(failed_call(status), "host:1")
    assert type(back) is type(error)
    assert str(back) == "host:1: a"
    if isinstance(back, errors.CapacityError):
        assert back.retry_after_s == 2.5


def test_a_message_above_grpcs_limit_is_too_long_a_prompt() -> None:
    """A prompt too large for any gRPC message gets the error of too long prompts, at which agents shorten their chats.

    Regression: it got an error of another kind, without the code context_length_exceeded over HTTP.
    """
    limit = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5000000 vs. 4194304)")
    told = from_rpc_error(failed_call(limit), "host:1")
    assert isinstance(told, errors.ContextLengthError)
    assert from_error(told, "/v1/chat/completions").body()["error"]["code"] == "context_length_exceeded"
    assert from_error(told, "/v1/chat/completions").param == "messages"


def two_hops(told: errors.SpecDecError) -> errors.SpecDecError:
    """Return a target's error as a client gets it through a draft worker that serves requests."""
    for address in ("target:1", "draft:2"):
        status = to_status(told)
        assert status is not None
        assert "target" not in status.message
        told = from_rpc_error(failed_call(status), address)
    return told


def test_details_for_callers_survive_two_hops() -> None:
    """After two servers, an error still names the client's wrong field and the address of the failed server."""
    told = two_hops(errors.InvalidRequestError("top_p 0 is outside (0, 1]", field="top_p"))
    assert isinstance(told, errors.InvalidRequestError)
    assert (told.message, told.field) == ("top_p 0 is outside (0, 1]", "top_p")
    assert str(told) == "draft:2: target:1: top_p 0 is outside (0, 1]"
    final = errors.UnavailableError("it died over the request")
    assert not two_hops(final).is_final
    final.is_final = True
    assert two_hops(final).is_final


def test_every_error_of_a_request_has_a_status() -> None:
    leaves = {
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.SpecDecError) and not error.__subclasses__()
    }
    hidden = errors.ConfigError | errors.HandshakeError | errors.OtherServerError
    not_said = {error for error in leaves if issubclass(error, hidden)}
    assert leaves - not_said <= {type(error) for error in SAME_ON_BOTH_SIDES}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, errors.OtherServerError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.DATA_LOSS, errors.InternalError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityError),
    ],
)
def test_statuses_without_details_become_errors_of_their_class(
    code: grpc.StatusCode, expected: type[Exception]
) -> None:
    """A status from a proxy, without this project's details, becomes an exception of the right class."""
    assert type(from_rpc_error(failed_call(Status(code, "")), "host:1")) is expected


def test_a_write_to_a_broken_connection_is_lost() -> None:
    """A call that fails in writing to a broken connection counts as one whose server is lost.

    Regression: grpcio reports INTERNAL for such a call, so the request failed instead of going on at another server.
    """
    error = from_rpc_error(failed_call(Status(grpc.StatusCode.INTERNAL, "Internal error from Core")), "host:1")
    assert type(error) is errors.UnavailableError
    assert "host:1" in str(error)


def test_foreign_errors_are_internal() -> None:
    assert to_status(KeyError("x")) is None
    assert code_name(KeyError("x")) == "INTERNAL"
    assert code_name(errors.DeadlineError("x")) == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("error", [errors.UnauthenticatedError, errors.ForbiddenError])
def test_refused_credentials_are_not_the_clients_fault(error: type[errors.SpecDecError]) -> None:
    """If a target refuses a gateway's credentials, the gateway's client is not told to check its own.

    The gateway's log names the target, and the client's error does not.
    """
    behind = to_status(for_client(error("the token is not known here", address="target:1")))
    assert behind is not None
    assert (behind.code, "target" in behind.message) == (grpc.StatusCode.UNAVAILABLE, False)
    assert from_error(error("the token is not known here", address="target:1")).status == 503
    assert from_error(error("the token is not known here")).status in (401, 403)
    own = to_status(for_client(error("the token is not known here")))
    assert own is not None
    assert own.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def test_a_handshake_that_fails_at_work_is_named() -> None:
    """If reconnecting an open channel fails in the TLS handshake, the error names the cause.

    The test uses the message of gRPC 1.85.
    """
    words = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed "
        "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:"
        "OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
        "certificate has expired: OK"
    )
    error = from_rpc_error(failed_call(Status(grpc.StatusCode.UNAVAILABLE, words)), "host:1")
    assert isinstance(error, errors.HandshakeError)
    assert str(error) == "host:1: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK"
