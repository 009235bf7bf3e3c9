"""Commands that create access tokens, and trial certificates, which servers make for themselves (--tls_self_signed)."""

from __future__ import annotations

import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from specdec.grpc_comm.channel import HandshakeError, check_handshake
from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.server import Server
from specdec.grpc_comm.tls import ClientTls, ServerTls
from specdec.inference.caller import Right
from specdec.inference.cli.app import main, prepared
from specdec.inference.cli.roles.registry import settings_of
from specdec.inference.cli.roles.target import TargetSettings
from specdec.inference.cli.self_signed import make_trial
from specdec.inference.config import ServerConfig
from specdec.inference.errors import ConfigError
from specdec.inference.workers.calls.access import Access


def token(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["--role", "token", *map(str, arguments)]) == 0
    return capsys.readouterr().out.strip()


def test_a_new_token_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "auth.toml"
    alice = token(capsys, "--auth_file", file, "--name", "alice", "--grant", "client")
    access = Access(file)
    bob = token(capsys, "--auth_file", file, "--name", "bob", "--grant", "worker", "--grant", "ops")
    for text, name, right in ((alice, "alice", Right.CLIENT), (bob, "bob", Right.OPS)):
        assert access.by_token(f"Bearer {text}", frozenset({right})).name == name
        assert text not in file.read_text()
        assert hashlib.sha256(text.encode()).hexdigest() in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


def test_a_gateways_token_speaks_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, flags = tmp_path / "auth.toml", {"gateway": ["--speaks_for_others"], "alice": []}
    tokens = {
        name: token(capsys, "--auth_file", file, "--name", name, "--grant", "client", *flags[name]) for name in flags
    }
    access, client = Access(file), frozenset({Right.CLIENT})
    speaks = {name: access.by_token(f"Bearer {text}", client).speaks_for_others for name, text in tokens.items()}
    assert speaks == {"gateway": True, "alice": False}


def test_a_file_that_others_may_read_stays_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of access tokens keeps its mode when a command adds a token.

    Regression: after root had added a token, the servers' user could not read the file, and refused the
    token.
    """
    file = tmp_path / "auth.toml"
    token(capsys, "--auth_file", file, "--name", "alice", "--grant", "client")
    file.chmod(0o640)
    token(capsys, "--auth_file", file, "--name", "bob", "--grant", "client")
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_file_servers_cannot_use_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "auth.toml"
    token(capsys, "--auth_file", file, "--name", "alice", "--grant", "client")
    before = file.read_text()
    for name, words in (("alice", "name alice is there twice"), ('a"b', "Expected newline")):
        assert main(["--role", "token", "--auth_file", str(file), "--name", name, "--grant", "client"]) == 2
        assert f"{file}: {words}" in capsys.readouterr().err
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def server(*arguments: str | Path) -> ServerConfig:
    settings: TargetSettings = prepared(settings_of("target", [str(argument) for argument in arguments]))
    return settings.server


def test_trial_certificates_are_made_once_and_fit_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    config = server("--host", "0.0.0.0", "--tls_self_signed", folder)
    made = {file: file.read_bytes() for file in folder.iterdir()}
    stems = ["client.key", "client.pem", "server.key", "server.pem"]
    assert sorted(file.name for file in made) == ["ca.pem", *stems, "trial_ca.key"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in made if file.suffix == ".key")
    assert config.security.cert is not None
    assert config.security.key is not None
    assert 89 < ServerTls(config.security.cert, config.security.key, folder / "ca.pem").days_left <= 90
    ClientTls(folder / "ca.pem", folder / "client.pem", folder / "client.key").grpc_credentials()
    server("--host", "0.0.0.0", "--tls_self_signed", folder)
    assert {file: file.read_bytes() for file in folder.iterdir()} == made
    with pytest.raises(ConfigError, match="--tls_self_signed and --tls_cert: a server has one certificate"):
        server("--tls_self_signed", folder, "--tls_cert", folder / "server.pem")


@pytest.mark.parametrize(
    ("family", "host", "far"), [(socket.AF_INET, "0.0.0.0", "192.0.2.1"), (socket.AF_INET6, "::", "2001:db8::1")]
)
async def test_a_trial_server_is_trusted_at_its_interface_address(
    tmp_path: Path, family: socket.AddressFamily, host: str, far: str
) -> None:
    """The certificate that --tls_self_signed makes has the addresses of the machine's interfaces.

    `far` is an address elsewhere, by which the test finds an interface; nothing is sent there.

    Regression: README's commands failed if HOST was an IP address: without DNS the certificate lacked
    it.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # chooses an interface, and sends nothing
            own = probe.getsockname()[0]
    except OSError:
        pytest.skip("no interface has such an address")
    config = server("--host", host, "--tls_self_signed", tmp_path / "certs")
    assert config.security.cert is not None
    assert config.security.key is not None
    gate = Gate(ServerTls(config.security.cert, config.security.key).grpc_credentials())
    serving = Server("[::]:0" if ":" in host else f"{host}:0", [], status_of=lambda _: None, gate=gate)
    await serving.open()
    try:
        address = f"[{own}]:{serving.port}" if ":" in own else f"{own}:{serving.port}"
        client = ClientTls(tmp_path / "certs" / "ca.pem")
        await check_handshake(address, client)
        with pytest.raises(HandshakeError, match=rf"It names .*{own}.*: --tls_server_name "):
            await check_handshake(address, replace(client, server_name="elsewhere.example"))
    finally:
        await serving.close()


def test_a_trial_certificate_gets_new_names_from_its_ca(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trial certificate is issued anew for another host by its old CA, so clients' ca.pem stays valid."""
    folder = tmp_path / "certs"
    caplog.set_level("INFO")
    server("--host", "edge.example", "--tls_self_signed", folder)
    ca, before = (folder / "ca.pem").read_bytes(), (folder / "server.pem").read_bytes()
    for _ in range(2):
        server("--host", "192.0.2.77", "--tls_self_signed", folder)
    server("--host", "Edge.Example", "--tls_self_signed", folder)
    lines = [record.getMessage() for record in caplog.records if "now names" in record.getMessage()]
    assert lines == [f"{folder / 'server.pem'} now names 192.0.2.77 too; clients keep their ca.pem"]
    assert (folder / "ca.pem").read_bytes() == ca
    assert (folder / "server.pem").read_bytes() != before
    ServerTls(folder / "server.pem", folder / "server.key")


def test_trial_certificates_without_their_ca_key_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the CA's key is missing, trial certificates stay as they are; a warning names the host that they lack."""
    folder = tmp_path / "certs"
    server("--tls_self_signed", folder)
    (folder / "trial_ca.key").unlink()
    before = {file: file.read_bytes() for file in folder.iterdir()}
    server("--host", "192.0.2.77", "--tls_self_signed", folder)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{folder / 'server.pem'} does not name 192.0.2.77" in line
    assert "--tls_server_name" in line
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["my_host", "", "a..b", "*", "1.0.0.127.in-addr.arpa"])
def test_an_invalid_host_name_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A host name that no certificate can have is left out of the certificate.

    Regression: on a machine called my_host, `--tls_self_signed` ended with a traceback.
    """
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    server("--tls_self_signed", tmp_path)
    ServerTls(tmp_path / "server.pem", tmp_path / "server.key")


def test_servers_that_start_together_agree_on_their_certificates(tmp_path: Path) -> None:
    """Servers that make trial certificates in one folder at the same time use one CA and its certificates.

    Regression: each server made a CA. Some left a server.pem that ca.pem does not verify, and later starts kept it.
    """
    for number in range(5):
        folder = tmp_path / str(number)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _, folder=folder: make_trial(folder, "127.0.0.1"), range(8)))
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        for name in ("server", "client"):
            own = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
            own.verify_directly_issued_by(authority)
            key = load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
            assert key.public_key() == own.public_key()


def test_a_broken_chain_of_trial_certificates_is_named(tmp_path: Path) -> None:
    for name in ("one", "other"):
        make_trial(tmp_path / name, "127.0.0.1")
    (tmp_path / "one" / "server.pem").write_bytes((tmp_path / "other" / "server.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.pem has not issued server\.pem: remove the folder"):
        server("--tls_self_signed", tmp_path / "one")
    (tmp_path / "one" / "trial_ca.key").unlink()
    server("--tls_self_signed", tmp_path / "one")  # an operator's, who may have a longer chain
