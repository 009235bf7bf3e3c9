"""Credentials for connections to servers, made from the configuration, and a check of servers' certificates."""

from __future__ import annotations

import ssl
from dataclasses import replace

from specdec.grpc_comm.channel import check_handshake
from specdec.grpc_comm.secured import AUTHORIZATION, Credentials, watched_keys, watched_token
from specdec.grpc_comm.tls import ClientTls
from specdec.grpc_comm.watched import UnusableError
from specdec.inference.config import DialSecurity
from specdec.inference.errors import ConfigError
from specdec.inference.workers.calls.status import calls_to


def credentials_of(security: DialSecurity) -> Credentials | None:
    """Return the credentials of a gRPC channel; None if `security` has neither a CA for TLS nor a token file.

    Raises:
        ConfigError: a certificate or token file cannot be used.
    """
    if security.ca is None and security.token_file is None:
        return None
    try:
        token = None if security.token_file is None else watched_token(security.token_file)
        tls = _tls_of(security)
        if tls is not None:
            watched_keys(tls)
    except (UnusableError, OSError) as exc:
        raise ConfigError(str(exc)) from exc
    return Credentials(tls, token)


def web_credentials(security: DialSecurity) -> tuple[dict[str, str], ssl.SSLContext]:
    """Return an HTTP client's headers, with its access token, and its TLS context, with its certificate and CAs.

    Without a token file there are no headers. If the settings name no CA, those of the system are trusted.

    Raises:
        ConfigError: a certificate or token file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=security.ca)
        if security.cert is not None:
            context.load_cert_chain(security.cert, security.key)
    except OSError as exc:  # ssl.SSLError is one, too
        raise ConfigError(f"certificates cannot be used: {exc}") from exc
    if security.token_file is None:
        return {}, context
    try:
        return {AUTHORIZATION: f"Bearer {watched_token(security.token_file).get()}"}, context
    except (UnusableError, OSError) as exc:
        raise ConfigError(str(exc)) from exc


def named(security: DialSecurity, name: str | None) -> DialSecurity:
    """Return the settings for a server found by the DNS name `name`, which its certificate then must have.

    The settings stay as they are if `name` is None, if they have no TLS, or if they set a server name themselves.
    """
    if security.ca is None or name is None:
        return security
    return replace(security, server_name=security.server_name or name)


def _tls_of(security: DialSecurity) -> ClientTls | None:
    if security.ca is None:
        return None
    return ClientTls(security.ca, security.cert, security.key, security.server_name)


async def check_link(address: str, security: DialSecurity) -> None:
    """Check by a TLS handshake whether a server whose connection was lost can be trusted.

    Do nothing if the server cannot be reached, or if `security` has no TLS.

    Raises:
        HandshakeError: the server can be reached, and the TLS handshake fails; the message names the reason.
    """
    tls = _tls_of(security)
    if tls is not None:
        with calls_to(address):
            await check_handshake(address, tls)
