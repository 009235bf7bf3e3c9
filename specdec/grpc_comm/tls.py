"""TLS of servers and clients: PEM files that may be replaced at any time, and the causes of failed handshakes.

A server uses a new certificate from the next connection on. A client needs a new channel, see
`specdec.grpc_comm.secured`. TLS 1.2 is the least, names are verified, and neither can be switched off.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import grpc

from specdec.grpc_comm.watched import UnusableError, Watched

HTTP2 = "h2"
AGAIN_S = 0.05
"""Seconds between the two handshakes of `ClientTls.fault`."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of a gRPC client, with settings that change nothing; an HTTP/1 server answers them with HTTP/1."""
_NAME_MISMATCHES = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_REASONS = {
    "KEY_VALUES_MISMATCH": "the key belongs to another certificate",
    "PEM lib": "one of them is not valid PEM, or is cut off",
    "NO_START_LINE": "it is not valid PEM, or is cut off",
    "WRONG_VERSION_NUMBER": "it speaks plain text, not TLS",
    "RECORD_LAYER_FAILURE": "it speaks plain text, not TLS",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a client certificate (--tls_client_cert)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the CA of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our client certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not take our client certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not take our client certificate",
}


@dataclass(frozen=True, slots=True)
class _Pair:
    """A server's certificate and key, and the CAs that clients' certificates must come from.

    Attributes:
        chain, key: contents of their PEM files; the chain begins with the certificate itself.
        client_ca: PEM of these CAs; None if clients show no certificates.
        expires: when the certificate expires.
        context: TLS context with certificate and key, for HTTP ports.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None
    expires: datetime
    context: ssl.SSLContext

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_ca)


class ServerTls:
    """Certificate of a server, read again when its files change.

    Args:
        cert, key: PEM; intermediate certificates follow the server's own.
        client_ca: PEM of CAs, for ports that take client certificates.

    Raises:
        UnusableError: the files cannot be used.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        paths = [cert, key] if client_ca is None else [cert, key, client_ca]
        self._pair = Watched(paths, lambda: _read_pair(cert, key, client_ca))

    @property
    def is_stale(self) -> bool:
        """Return whether the files have changed and their new version cannot be used."""
        self._pair.get()
        return self._pair.is_stale

    @property
    def days_left(self) -> float:
        """Days until the certificate in use expires."""
        return (self._pair.get().expires - datetime.now(UTC)).total_seconds() / 86400

    def grpc_credentials(self, *, client_certificates: bool = False) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port; with `client_certificates` they refuse clients without one."""
        served = self._pair.get()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return the new certificate at a handshake; None if it is unchanged."""
            nonlocal served
            pair = self._pair.get()
            if pair is served:
                return None
            served = pair
            return pair.configuration()

        fetcher = cast(
            Callable[[], grpc.ServerCertificateConfiguration], fetch
        )  # None is allowed, although the stubs deny it
        return grpc.dynamic_ssl_server_credentials(served.configuration(), fetcher, client_certificates)

    def http_context(self) -> ssl.SSLContext:
        """Return the TLS context of an HTTP port; each handshake shows the present certificate."""
        context = _server_context()  # replaced at each handshake by the pair's own

        def current(handshake: Any, name: str | None, outer: ssl.SSLContext) -> None:
            """Give a handshake the context of the present certificate, even if the client names no server."""
            handshake.context = self._pair.get().context

        context.sni_callback = current
        return context


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read_pair(cert: Path, key: Path, client_ca: Path | None) -> _Pair:
    context = _server_context()
    chain, secret = _load_pair(context, cert, key)
    return _Pair(chain, secret, None if client_ca is None else _read_ca(client_ca), _expiry(cert, chain), context)


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Load a certificate and its key into a TLS context, which checks them; return the contents of both files.

    Raises:
        UnusableError: they cannot be used, or have changed meanwhile.
    """
    chain, secret = cert.read_bytes(), key.read_bytes()
    try:
        context.load_cert_chain(cert, key, password="")  # or OpenSSL would ask for one on the terminal
    except (ssl.SSLError, ValueError) as exc:
        raise UnusableError(f"{cert} and {key} are not a certificate and its key: {_reason(exc)}") from exc
    if (chain, secret) != (cert.read_bytes(), key.read_bytes()):  # OpenSSL reads files by their paths alone
        raise UnusableError(f"{cert} or {key} changed while it was read")
    return chain, secret


def _expiry(path: Path, chain: bytes) -> datetime:
    """Return when the certificate expires.

    Args:
        path: its file, for messages.
        chain: content of the file, PEM, of which the first certificate counts.

    Raises:
        UnusableError: it is not valid now, or not PEM.
    """
    from cryptography import x509  # servers without TLS do not pay for the import

    try:
        own = x509.load_pem_x509_certificates(chain)[0]
    except ValueError as exc:
        raise UnusableError(f"{path} is not a PEM certificate: {exc}") from exc
    if not own.not_valid_before_utc <= datetime.now(UTC) < own.not_valid_after_utc:
        span = f"{own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise UnusableError(f"{path} is valid from {span}: not now")
    return own.not_valid_after_utc


@lru_cache(maxsize=256)
def names_in(certificate: bytes) -> tuple[str, ...]:
    """Return the DNS names and URIs of a PEM certificate that a handshake has verified; empty if it has none.

    grpcio's own list does not tell kinds of names apart, and cuts a name at a zero byte. So a certificate with a name
    of another kind, or with a longer name, could pass for that of a caller.
    """
    from cryptography import x509

    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return ()
    hosts = [name for name in names.get_values_for_type(x509.DNSName) if not {*"\0/:"} & {*name}]
    uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if ":" in uri and "\0" not in uri]
    return (*hosts, *uris)


def _read_ca(path: Path) -> bytes:
    text = path.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii"))
    except (ssl.SSLError, ValueError) as exc:
        raise UnusableError(f"{path} holds no PEM certificate of a CA: {_reason(exc)}") from exc
    return text


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files of a client's certificates: of the CAs that it trusts, and of its own.

    Attributes:
        ca: PEM of the CAs that the server's certificate may come from.
        cert, key: PEM of the client's own certificate and its key; None if it has none.
        server_name: the name that must be in the server's certificate; None: the host that is dialled.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    @property
    def paths(self) -> list[Path]:
        """Files that a channel reads."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a new channel, from the present files.

        Raises:
            UnusableError: the files cannot be used.
        """
        _, ca, chain, key = self._loaded()
        return grpc.ssl_channel_credentials(ca, key, chain)

    def context(self) -> ssl.SSLContext:
        """Return a TLS context of Python's ssl, for handshakes that find out why gRPC's fail.

        Raises:
            UnusableError: the files cannot be used.
        """
        return self._loaded()[0]

    def _loaded(self) -> tuple[ssl.SSLContext, bytes, bytes | None, bytes | None]:
        """Return the TLS context, and the contents of the files of CAs, certificate and key loaded into it."""
        ca = _read_ca(self.ca)
        context = ssl.create_default_context(cadata=ca.decode("ascii"))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([HTTP2])
        if self.cert is None or self.key is None:
            return context, ca, None, None
        chain, key = _load_pair(context, self.cert, self.key)
        _expiry(self.cert, chain)
        return context, ca, chain, key

    async def fault(self, address: str, timeout_s: float) -> str | None:
        """Return why handshakes with HOST:PORT fail; None if one succeeds, or if no server answers.

        In TLS 1.3 a server refuses a client's certificate only after the handshake, and a gRPC server then closes the
        connection without a reason. A server that shuts down does the same, so a second handshake is tried.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(2):
                    if await self._is_taken(address):
                        return None
                    await asyncio.sleep(AGAIN_S)
        except ssl.SSLError as exc:
            return _reason(exc) + await self._way_out(exc, address, timeout_s)
        except UnusableError as exc:
            return str(exc)
        except (OSError, TimeoutError):
            return None
        if self.cert is None:
            return "it ends the connection after the handshake: it wants a client certificate (--tls_client_cert)"
        return f"it ends the connection after the handshake: it does not take the client certificate {self.cert}"

    async def _way_out(self, error: ssl.SSLError, address: str, timeout_s: float) -> str:
        """Return a hint for a certificate without the dialled name: its names, and the flag that accepts one of them.

        Return an empty text for other errors.
        """
        if getattr(error, "verify_code", None) not in _NAME_MISMATCHES:
            return ""
        try:
            async with asyncio.timeout(timeout_s):
                names = await self._names_at(address)
        except (OSError, TimeoutError, UnusableError):
            return ""
        if not names:
            return " It names no host"
        return f" It names {', '.join(names)}: --tls_server_name {names[0]} accepts it"

    async def _names_at(self, address: str) -> list[str]:
        """Return the names in the certificate that HOST:PORT shows; its CA is checked, the dialled name is not."""
        context = self.context()
        context.check_hostname = False
        _, writer = await asyncio.open_connection(*split_address(address), ssl=context)
        names = writer.get_extra_info("peercert").get("subjectAltName", ())
        writer.transport.abort()
        dns = [name for kind, name in names if kind == "DNS"]
        return dns + [str(ip_address(name.strip())) for kind, name in names if kind == "IP Address"]

    async def _is_taken(self, address: str) -> bool:
        """Return whether HOST:PORT sends anything after a handshake, as an HTTP/2 server does to accepted clients."""
        name = self.server_name or split_address(address)[0]
        return await _answer(address, 1, ssl=self.context(), server_hostname=name) != b""


async def greeting(address: str, timeout_s: float) -> bytes | None:
    """Return the first bytes that HOST:PORT answers to plain-text gRPC; None if no server answers.

    There are at most 7, as many as an answer in HTTP/1 has before its minor version; none if the server ends the
    connection without an answer.

    Raises:
        socket.gaierror: the host is not known.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _answer(address, len(b"HTTP/1."))
    except socket.gaierror:
        raise
    except (OSError, TimeoutError):
        return None


async def _answer(address: str, num_bytes: int, **tls: Any) -> bytes:
    """Return the first bytes, at most `num_bytes`, that a server answers to a gRPC client; none if it hangs up.

    Args:
        tls: arguments of `asyncio.open_connection` for TLS; none for plain text.
    """
    reader, writer = await asyncio.open_connection(*split_address(address), **tls)
    try:
        writer.write(HTTP2_PREFACE)
        return await reader.read(num_bytes)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without the brackets of IPv6, and the port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _reason(error: Exception) -> str:
    """Return an OpenSSL error in plain words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    reason = getattr(error, "reason", None) or ("PEM lib" if "PEM lib" in str(error) else None)
    return _REASONS.get(reason or "", str(reason or error).lower().replace("_", " "))
