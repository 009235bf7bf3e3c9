"""A server's ports: which of them are encrypted, what each of them answers, and which configurations are refused."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import httpx
import pytest

from specdec.grpc_comm.guard import OPEN
from specdec.inference.config import ConnectionConfig, DialSecurity, ObserveConfig, PortSecurity, ServerConfig
from specdec.inference.errors import ConfigError
from specdec.inference.serving.fronts import GrpcFront, Ports
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.remote import card_of
from tests.support.certificates import Pki, pki
from tests.support.completers import CARD
from tests.support.ports import https, served


@pytest.fixture
def trust(tmp_path: Path) -> Pki:
    return pki(tmp_path / "ours")


async def test_every_port_but_that_of_probes_is_encrypted(trust: Pki) -> None:
    async with served(PortSecurity(*trust.pair("server"))) as at, https(trust) as client:
        answer = await client.post(f"https://127.0.0.1:{at.http}/v1/completions", json={"prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "ab"
        metrics = (await client.get(f"https://127.0.0.1:{at.metrics}/metrics")).text
        assert 'vllm:generation_tokens_total{model_name="tiny"} 2.0' in metrics
        assert "specdec_tls_days_left" in metrics
        for port in (at.http, at.metrics):
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://127.0.0.1:{port}/metrics")
        probes = [await client.get(f"http://127.0.0.1:{at.probes}{path}") for path in ("/livez", "/readyz", "/metrics")]
        assert [answer.status_code for answer in probes] == [200, 200, 404]
        link = ConnectionConfig("127.0.0.1", at.grpc, 60.0, security=DialSecurity(trust.ca))
        async with connected(link) as fleet:
            assert await card_of(fleet) == CARD


async def test_the_log_has_a_page_and_a_command_that_work(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the page's address and a command to try the server, and both work.

    Regression: the log had the address alone, and neither the page nor a command to try the server.
    """
    caplog.set_level(logging.INFO)
    async with served(PortSecurity()), httpx.AsyncClient() as client:
        lines = [record.getMessage() for record in caplog.records]
        (page,) = (line.removeprefix("a page to try it: ") for line in lines if line.startswith("a page"))
        assert "<html" in (await client.get(page)).text
        (curl,) = (line for line in lines if "curl" in line)
        _, url, _, header, _, body = shlex.split(curl.partition(": ")[2])
        answer = await client.post(url, content=body, headers=dict([header.split(": ")]))
        assert answer.json()["choices"][0]["text"] == "ab"
    assert sum("specdec fused_client --port" in line for line in lines) == 1


@pytest.mark.parametrize("answers", [True, False])
async def test_a_server_that_answers_no_client_advises_none(caplog: pytest.LogCaptureFixture, answers: bool) -> None:
    """A server logs a command for trying it only if it answers clients.

    Regression: a target that serves draft workers only logged a command that it refuses.
    """
    caplog.set_level("INFO")
    front = GrpcFront(ServerConfig("127.0.0.1", 0), [], OPEN, answers=answers)
    await front.open()
    await front.close()
    assert ("a command to try it: specdec fused_client" in caplog.text) == answers


async def test_https_follows_its_files_too(trust: Pki) -> None:
    cert, key = trust.pair("server")
    async with served(PortSecurity(cert, key)) as at:
        url = f"https://127.0.0.1:{at.http}/health"
        async with https(trust) as client:
            assert (await client.get(url)).status_code == 200
        key.write_text("no key")
        async with https(trust) as client:
            assert (await client.get(url)).status_code == 200
            lines = (await client.get(f"https://127.0.0.1:{at.http}/metrics")).text.splitlines()
        assert 'specdec_security_files_stale{model_name="tiny"} 1.0' in lines
        trust.pair("server", "elsewhere.example")
        async with https(trust) as client:
            with pytest.raises(httpx.ConnectError, match="IP address mismatch"):
                await client.get(url)


async def test_a_server_never_starts_with_half_of_its_protection(trust: Pki) -> None:
    cert, key = trust.pair("server")
    for security, words in (
        ((cert, trust.folder / "none.key"), "none.key: No such file"),
        ((*trust.pair("old", expired=True),), "not now"),
        ((cert, key, None, None, cert), "server.pem: Expected '='"),
        ((cert, key, None, None, cert.with_name("none.toml")), "none.toml: No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            Ports(ServerConfig(port=0, security=PortSecurity(*security)), ObserveConfig("target"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cert": Path("a")}, "--tls_cert and --tls_key go together"),
        ({"client_ca": Path("a")}, "--tls_client_ca and --mtls_port go together"),
        ({"client_ca": Path("a"), "mtls_port": 1}, "--mtls_port needs --tls_cert and --tls_key, and --auth_file"),
    ],
)
def test_settings_that_protect_nothing_are_refused(given: dict[str, Path], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PortSecurity(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_plain_text_off_loopback_names_the_ways_out(host: str, trust: Pki) -> None:
    """A server refuses a --host that other machines reach in plain text; the error names TLS and --insecure.

    Regression: a server on a network served plain text to every client without a warning.
    """
    with pytest.raises(ConfigError, match=rf"host {host} is not loopback.*--tls_cert and --tls_key .*--insecure"):
        ServerConfig(host)
    assert not ServerConfig(host, security=PortSecurity(insecure=True)).on_loopback
    assert not ServerConfig(host, security=PortSecurity(*trust.pair("server"))).on_loopback


def test_a_token_is_not_sent_in_plain_text() -> None:
    security = DialSecurity(token_file=Path("token"))
    with pytest.raises(
        ConfigError, match=r"the token, prompts and answers would go to 10.0.0.1 in plain text: --tls_ca"
    ):
        ConnectionConfig("10.0.0.1", 1, security=security)
    with pytest.raises(ConfigError, match=r"^prompts and answers would go to 10.0.0.1 in plain text"):
        ConnectionConfig("10.0.0.1", 1)
    ConnectionConfig("10.0.0.1", 1, security=DialSecurity(insecure=True))
    ConnectionConfig("127.0.0.1", 1, security=security)
    with pytest.raises(ConfigError, match="--tls_client_cert without --tls_ca"):
        DialSecurity(cert=Path("a"), key=Path("b"))


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", True), ("0.0.0.0", False)])
async def test_a_server_that_others_cannot_reach_logs_it(
    host: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A server on loopback logs that only this machine can reach it, and the flag that changes this.

    Regression: a target on loopback logged "serving", and a draft on another machine could not reach it.
    """
    caplog.set_level("INFO")
    front = GrpcFront(ServerConfig(host, 0, security=PortSecurity(insecure=True)), [], OPEN, answers=False)
    await front.open()
    await front.close()
    assert f"serving on {host}:{front.port}" in caplog.text
    assert ("for this machine alone: --host serves others" in caplog.text) == is_told
