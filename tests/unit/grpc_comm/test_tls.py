"""TLS over real sockets: whom both sides trust, errors that name the cause, and certificates replaced while in use."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from specdec.grpc_comm.channel import HandshakeError, UnreachableError, open_channel, wait_until_ready
from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.health import is_serving
from specdec.grpc_comm.secured import Credentials, watched_token
from specdec.grpc_comm.tls import ClientTls, ServerTls, names_in
from specdec.grpc_comm.watched import UnusableError
from tests.support.certificates import Pki, pki
from tests.support.ports import listening


@pytest.fixture
def trust(tmp_path: Path) -> Pki:
    return pki(tmp_path / "ours")


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials | None) -> AsyncGenerator[str, None]:
    async with listening(gate=Gate(credentials)) as server:
        yield f"127.0.0.1:{server.port}"


async def dial(address: str, tls: ClientTls | None) -> bool:
    """Return whether a client with this TLS configuration reaches the server and finds it SERVING."""
    async with open_channel(address, None if tls is None else Credentials(tls)) as channel:
        await wait_until_ready(channel, address, timeout_s=2.0, tls=tls)
        return await is_serving(channel)


async def test_a_server_is_what_its_certificate_names(trust: Pki, tmp_path: Path) -> None:
    """The error about a server's certificate for other names shows these names, and the flag that accepts one of them.

    Regression: the error was "IP address mismatch", without the certificate's names and without the flag.
    """
    tls = ServerTls(*trust.pair("server", "127.0.0.1", "draft.example", "::1"))
    async with serving(tls.grpc_credentials()) as address:
        assert await dial(address, trust.client())
        assert await dial(address, replace(trust.client(), server_name="draft.example"))
        way_out = r"It names draft.example, 127.0.0.1, ::1: --tls_server_name draft.example accepts it"
        for name, words in (("other.example", "Hostname mismatch"), ("127.0.0.2", "IP address mismatch")):
            with pytest.raises(HandshakeError, match=rf"{words}, certificate is not valid for '{name}'. {way_out}"):
                await dial(address, replace(trust.client(), server_name=name))
        with pytest.raises(HandshakeError, match="not trusted: unable to get local issuer certificate"):
            await dial(address, pki(tmp_path / "theirs").client())


async def test_an_expired_certificate_is_named_on_both_sides(trust: Pki) -> None:
    cert, key = trust.pair("server", expired=True)
    with pytest.raises(UnusableError, match=rf"{cert} is valid from .* UTC: not now"):
        ServerTls(cert, key)
    expired = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])  # it may expire while it serves
    async with serving(expired) as address:
        with pytest.raises(HandshakeError, match="certificate has expired"):
            await dial(address, trust.client())
    with pytest.raises(UnusableError, match="not now"):
        ClientTls(trust.ca, cert, key).grpc_credentials()


async def test_client_certificates_where_they_are_wanted(trust: Pki, tmp_path: Path) -> None:
    """A port that wants client certificates refuses a client without one.

    In TLS 1.3 the client notices this only after the handshake, by a lost connection.
    """
    tls = ServerTls(*trust.pair("server"), trust.ca)
    async with serving(tls.grpc_credentials(client_certificates=True)) as address:
        assert await dial(address, trust.client("spiffe://here/draft"))
        with pytest.raises(HandshakeError, match=r"wants a client certificate \(--tls_client_cert\)"):
            await dial(address, trust.client())
        foreign = replace(pki(tmp_path / "theirs").client("spiffe://here/draft"), ca=trust.ca)
        with pytest.raises(HandshakeError, match=r"does not take the client certificate .*client.pem"):
            await dial(address, foreign)


async def test_plain_text_and_tls_notice_each_other(trust: Pki) -> None:
    tls = ServerTls(*trust.pair("server"))
    async with serving(tls.grpc_credentials()) as address:
        with pytest.raises(UnreachableError, match=r"within 0.5 s: .* ends the connection. Is it TLS \(--tls_ca\)"):
            async with open_channel(address) as channel:
                await wait_until_ready(channel, address, timeout_s=0.5)
    async with serving(None) as address:
        with pytest.raises(HandshakeError, match="it speaks plain text, not TLS"):
            await dial(address, trust.client())


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:150])


def swap(trust: Pki) -> None:
    cert, key = trust.pair("server")
    text = cert.read_bytes()
    cert.write_bytes(key.read_bytes())
    key.write_bytes(text)


BROKEN: dict[str, tuple[Callable[[Pki], object], str]] = {
    "half-written": (lambda trust: half(trust.pair("server")[0]), "not valid PEM, or is cut off"),
    "half a key": (lambda trust: half(trust.pair("server")[1]), "are not a certificate and its key"),
    "swapped": (swap, "are not a certificate and its key"),
    "key of another": (
        lambda trust: trust.pair("other")[1].replace(trust.folder / "server.key"),
        "the key belongs to another certificate",
    ),
    "missing": (lambda trust: (trust.folder / "server.key").unlink(), "server.key: No such file"),
    "expired": (lambda trust: trust.pair("server", expired=True), "not now"),
}


@pytest.mark.parametrize(("spoil", "words"), BROKEN.values(), ids=BROKEN)
async def test_a_broken_pair_leaves_the_one_before(
    trust: Pki, caplog: pytest.LogCaptureFixture, spoil: Callable[[Pki], object], words: str
) -> None:
    """If a certificate's file becomes invalid, the earlier one stays in use; the error is logged once, and counted.

    The next valid version is used. At the start, an invalid file is an error.
    """
    cert, key = trust.pair("server", "127.0.0.1", "first.example")
    tls = ServerTls(cert, key)
    assert 29 < tls.days_left < 30
    async with serving(tls.grpc_credentials()) as address:
        first = replace(trust.client(), server_name="first.example")
        spoil(trust)
        for _ in range(2):
            assert await dial(address, first)
        assert tls.is_stale
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len([error for error in errors if words in error]) == 1, errors
        with pytest.raises(UnusableError, match=words):
            ServerTls(cert, key)
        trust.pair("server", "127.0.0.1", "second.example")
        assert await dial(address, replace(first, server_name="second.example"))
        assert not tls.is_stale


async def test_a_client_takes_a_new_certificate_without_a_restart(trust: Pki) -> None:
    """A client takes a new certificate without a restart.

    A channel cannot change its certificate, so a new one replaces it; running calls end on the old one.
    """
    tls = ServerTls(*trust.pair("server"), trust.ca)
    async with serving(tls.grpc_credentials(client_certificates=True)) as address:
        ours = trust.client("spiffe://here/one")
        async with open_channel(address, Credentials(ours)) as channel:
            assert await is_serving(channel)
            before = channel._channel  # type: ignore[attr-defined]
            trust.pair("client", "spiffe://here/two")
            assert await is_serving(channel)
            assert channel._channel is not before  # type: ignore[attr-defined]
            half(trust.folder / "client.pem")
            assert await is_serving(channel)


@pytest.mark.parametrize("text", ["", "\n", "two words", "naïve"])
def test_a_file_without_a_token_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(UnusableError, match="holds no token"):
        watched_token(tmp_path / "token")


def test_old_versions_of_tls_are_refused(trust: Pki) -> None:
    assert ServerTls(*trust.pair("server")).http_context().minimum_version is ssl.TLSVersion.TLSv1_2
    assert trust.client().context().minimum_version is ssl.TLSVersion.TLSv1_2
    assert trust.client().context().check_hostname


def test_names_of_a_certificate_keep_their_types() -> None:
    """A name in a certificate is matched only as its own type: a mail address is no host.

    Regression: grpcio gives names without types and up to a zero byte, so a mail address was admitted as a
    host.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([]), datetime.now(UTC)
    names = [
        x509.DNSName("cli.example\0.evil.example"),
        x509.DNSName("spiffe://x/edge"),
        x509.RFC822Name("cli.example"),
        x509.UniformResourceIdentifier("cli.example"),
        x509.UniformResourceIdentifier("spiffe://x/a\0b"),
        x509.IPAddress(ip_address("10.0.0.1")),
        x509.DNSName("own.example"),
        x509.UniformResourceIdentifier("spiffe://x/own"),
    ]
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    cert = builder.add_extension(x509.SubjectAlternativeName(names), False).sign(key, hashes.SHA256())
    assert names_in(cert.public_bytes(serialization.Encoding.PEM)) == ("own.example", "spiffe://x/own")
    assert names_in(b"none") == ()


SILENT = """
import asyncio, socket, specdec, grpc

async def main(cert, key):
    server = grpc.aio.server()
    pair = tuple(open(path, "rb").read() for path in (key, cert))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n")
        plain.setblocking(False)
        async with asyncio.timeout(60):
            while await asyncio.get_running_loop().sock_recv(plain, 100):  # an alert, then the end
                pass
    await server.stop(0)

asyncio.run(main(*__import__("sys").argv[1:]))
"""


def test_a_failed_handshake_writes_no_foreign_line(trust: Pki) -> None:
    """Plain text at a TLS port writes nothing to stderr in gRPC's own form, unless GRPC_VERBOSITY asks for it.

    Regression: each such connection wrote a line without an address, which parsers of the log could not read.
    """
    command = [sys.executable, "-c", SILENT, *map(str, trust.pair("server"))]
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    for added, is_shown in (({}, False), ({"GRPC_VERBOSITY": "INFO"}, True)):
        ended = subprocess.run(command, env=clean | added, capture_output=True, text=True, timeout=120, check=True)
        assert ("Handshake failed" in ended.stderr) is is_shown, ended.stderr
