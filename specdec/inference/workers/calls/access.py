"""Access control: which caller may make which gRPC call or HTTP request.

Without an auth file, every client may make every call, but at a server that a network can reach, none may draft for
other clients' requests. With an auth file, a client may do only what the file allows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from specdec.grpc_comm.watched import Watched
from specdec.inference.caller import ALL_RIGHTS, Caller, Right
from specdec.inference.errors import ForbiddenError, UnauthenticatedError
from specdec.inference.workers.calls.auth_file import read_auth_file

_GENERATION, _VERIFICATION = "/specdec.v1.GenerationService/", "/specdec.v1.VerificationService/"
_HEALTH = "/grpc.health.v1.Health/"
ASSIST, DRAIN = f"{_VERIFICATION}Assist", f"{_GENERATION}Drain"
_METHODS = {
    f"{_GENERATION}Generate": {Right.CLIENT},
    f"{_GENERATION}Tokenize": {Right.CLIENT},
    f"{_GENERATION}Detokenize": {Right.CLIENT},
    f"{_GENERATION}GetModel": {Right.CLIENT},
    f"{_GENERATION}GetLoad": {Right.CLIENT, Right.OPS, Right.ADMIN},
    DRAIN: {Right.ADMIN},  # without an auth file, on loopback alone: `Operation`
    ASSIST: {Right.CLIENT, Right.WORKER},  # a client may draft for its own requests, see VerificationServicer
    f"{_HEALTH}Check": ALL_RIGHTS,  # every known caller: it reports health only
    f"{_HEALTH}Watch": ALL_RIGHTS,
}
_PATHS = {
    "/v1/": {Right.CLIENT},
    "/tokenize": {Right.CLIENT},
    "/detokenize": {Right.CLIENT},
    "/version": ALL_RIGHTS,
    "/health": ALL_RIGHTS,
    "/ping": ALL_RIGHTS,
}
PAGE = "/"
"""Path of the web page, which everybody may load: it shows nothing of the server but a field for an access token."""


def rights_of_call(method: str) -> frozenset[Right]:
    """Return the rights of which the caller of a gRPC method needs at least one.

    A method that has no entry in `_METHODS` needs OPS, the right of operators.
    """
    return frozenset(_METHODS.get(method, {Right.OPS}))


def rights_of_path(path: str) -> frozenset[Right] | None:
    """Return the rights of which the caller of an HTTP path needs at least one; None if no right is needed.

    A path that begins like none of `_PATHS` needs OPS, the right of operators.
    """
    if path == PAGE:
        return None
    return frozenset(next((rights for name, rights in _PATHS.items() if path.startswith(name)), {Right.OPS}))


class Access:
    """Access control of one server.

    Args:
        auth_file: file that names the callers and their rights; None: there is none, and everybody is admitted.
        on_loopback: True if only clients on this machine can reach the server.

    Raises:
        UnusableError: the file is not valid at start. If it becomes so later, its last valid version stays in use.
    """

    def __init__(self, auth_file: Path | None = None, *, on_loopback: bool = True) -> None:
        self._file = None if auth_file is None else Watched([auth_file], lambda: read_auth_file(auth_file))
        self._anybody = Caller(rights=ALL_RIGHTS if on_loopback else ALL_RIGHTS - {Right.WORKER})

    @property
    def is_stale(self) -> bool:
        """Return whether the auth file has changed and its new version cannot be used."""
        if self._file is None:
            return False
        self._file.get()
        return self._file.is_stale

    def by_token(self, authorization: str, rights: frozenset[Right]) -> Caller:
        """Return the caller that the header `authorization`, "Bearer TOKEN", identifies, if it has one of the rights.

        Without an auth file, this is the same nameless caller for everybody.

        Raises:
            UnauthenticatedError: the token is unknown, or there is none.
            ForbiddenError: the caller has none of the rights.
        """
        if self._file is None:
            return require_any(rights, self._anybody)
        kind, _, token = authorization.strip().partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            raise UnauthenticatedError("no token came: a header Authorization: Bearer TOKEN is expected (--token_file)")
        who = self._file.get().of_token(token.strip())
        if who is None:
            raise UnauthenticatedError("the token is not known here")
        return require_any(rights, who)

    def by_certificate(self, names: Sequence[str], authorization: str, rights: frozenset[Right]) -> Caller:
        """Return the caller that a client certificate, verified by the TLS handshake, identifies, if it has a right.

        Args:
            names: DNS names and URIs of the certificate.
            authorization: the call's header; it must be empty.
            rights: rights of which the caller must have one.

        Raises:
            UnauthenticatedError: the call has a token besides the certificate.
            ForbiddenError: the caller is not in the file, or has none of the rights.
        """
        if authorization:
            raise UnauthenticatedError("a token came to the port of client certificates: send it to the other one")
        who = None if self._file is None else self._file.get().of_certificate(names)
        if who is None:
            raise ForbiddenError(f"the certificate of {', '.join(names) or 'no name'} has no role here")
        return require_any(rights, who)


def require_any(rights: Set[Right], who: Caller) -> Caller:
    """Return `who` if this caller has at least one of the `rights`; otherwise raise ForbiddenError."""
    if who.rights & rights:
        return who
    wanted = " or ".join(sorted(rights))
    if not who.name:
        raise ForbiddenError(f"without an auth file all may do everything but help: {wanted} needs an --auth_file")
    has = ", ".join(sorted(who.rights))
    error = ForbiddenError(f"{who.name} has role {has}, and this needs {wanted}")
    error.caller_name = who.name
    raise error
