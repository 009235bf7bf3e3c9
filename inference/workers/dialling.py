"""What a process shows to servers, and whom it trusts: from its configuration to channels."""

from __future__ import annotations

from dataclasses import replace

from grpc_comm.channel import check_handshake
from grpc_comm.secured import Credentials, watched_keys, watched_token
from grpc_comm.tls import ClientTls
from grpc_comm.watched import UnusableError
from inference.config import DialSecurity
from inference.errors import ConfigError
from inference.workers.status import calls_to


def credentials_of(security: DialSecurity) -> Credentials | None:
    """What a channel is opened with; None: nothing but an address.

    Raises:
        ConfigError: a file of certificates, or with the token, cannot be used.
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


def named(security: DialSecurity, name: str | None) -> DialSecurity:
    """For a server that was found by a name: its certificate has that name, and not the address."""
    if security.ca is None or name is None:
        return security
    return replace(security, server_name=security.server_name or name)


def _tls_of(security: DialSecurity) -> ClientTls | None:
    if security.ca is None:
        return None
    return ClientTls(security.ca, security.cert, security.key, security.server_name)


async def check_link(address: str, security: DialSecurity) -> None:
    """After a lost link: tell a server that is gone from one that can be reached and not be trusted.

    Raises:
        HandshakeError: there is no TLS with it, for a reason that is named.
    """
    tls = _tls_of(security)
    if tls is not None:
        with calls_to(address):
            await check_handshake(address, tls)
