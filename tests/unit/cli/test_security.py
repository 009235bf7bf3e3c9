"""Tokens and trial certificates, as they are made on the command line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from grpc_comm.tls import ClientTls, ServerTls
from inference.caller import Right
from inference.cli.app import main, prepared
from inference.cli.roles.registry import settings_of
from inference.cli.roles.target import TargetSettings
from inference.config import ServerConfig
from inference.errors import ConfigError
from inference.workers.access import Access


def token(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["--role", "token", *map(str, arguments)]) == 0
    return capsys.readouterr().out.strip()


def test_a_new_token_is_shown_once_and_known_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "auth.toml"
    alice = token(capsys, "--auth_file", file, "--name", "alice", "--grant", "client")
    access = Access(file)
    bob = token(capsys, "--auth_file", file, "--name", "bob", "--grant", "draft", "--grant", "ops")
    for text, name, right in ((alice, "alice", Right.CLIENT), (bob, "bob", Right.OPS)):
        assert access.by_token(f"Bearer {text}", frozenset({right})).name == name
        assert text not in file.read_text()
        assert hashlib.sha256(text.encode()).hexdigest() in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


def test_a_file_that_others_may_read_stays_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The story: a token that root made locked the file for the user that servers run as: the new one was unknown."""
    file = tmp_path / "auth.toml"
    token(capsys, "--auth_file", file, "--name", "alice", "--grant", "client")
    file.chmod(0o640)
    token(capsys, "--auth_file", file, "--name", "bob", "--grant", "client")
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_file_that_servers_could_not_use_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert sorted(file.name for file in made) == ["ca.pem", "client.key", "client.pem", "server.key", "server.pem"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in made if file.suffix == ".key")
    assert config.security.cert is not None
    assert config.security.key is not None
    assert 89 < ServerTls(config.security.cert, config.security.key, folder / "ca.pem").days_left <= 90
    ClientTls(folder / "ca.pem", folder / "client.pem", folder / "client.key").grpc_credentials()
    server("--host", "0.0.0.0", "--tls_self_signed", folder)
    assert {file: file.read_bytes() for file in folder.iterdir()} == made
    with pytest.raises(ConfigError, match="--tls_self_signed and --tls_cert: a server has one certificate"):
        server("--tls_self_signed", folder, "--tls_cert", folder / "server.pem")


def test_plain_text_off_loopback_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--role", "target", "--host", "0.0.0.0", "--port", "0"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "--tls_cert" in line
    assert "--insecure" in line
