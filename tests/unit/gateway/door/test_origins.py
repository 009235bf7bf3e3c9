"""Web pages of other origins: which of them a browser lets use a server's HTTP API (CORS)."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from specdec.inference.config import HttpConfig, PortSecurity, ServerConfig
from specdec.inference.errors import ConfigError
from specdec.inference.gateway.app import HttpFront
from specdec.inference.serving.host import opened
from specdec.inference.serving.processes import free_port
from specdec.inference.workers.calls.access import Access
from tests.support.browser import CHROMIUM, browser_page
from tests.support.completers import ScriptedCompleter, gateway
from tests.support.ports import entry, served, token_of

PAGE = "https://chat.example.com"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture
def auth(tmp_path: Path) -> Path:
    """Return a new file of access tokens with one token, of the account alice."""
    (file := tmp_path / "auth.toml").write_text(entry("alice", "client"))
    return file


@asynccontextmanager
async def asked_of(origins: str, *, auth: Path | None = None) -> AsyncGenerator[tuple[httpx.AsyncClient, int], None]:
    """Serve a scripted model to web pages of these origins; yield an HTTP client and the server's port."""
    access = None if auth is None else Access(auth)
    served = gateway(ScriptedCompleter([["Once", " upon"]]), port=(port := free_port()), allowed_origins=origins)
    async with (
        opened(HttpFront(served, ServerConfig(grace_s=0.1), access=access)),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        yield client, port


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_a_named_origin_is_let_in_and_others_are_not(auth: Path, *, has_tokens: bool) -> None:
    """A page of a named origin can use the server and can read the error about a missing token; other pages cannot.

    `has_tokens` tells whether the server asks for access tokens.

    The browser's preflight request comes without the token, and is answered all the same.
    """
    token = {"Authorization": f"Bearer {token_of('alice')}"} if has_tokens else {}
    async with asked_of(f"{PAGE}, http://localhost:3000", auth=auth if has_tokens else None) as (client, _):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models"):
            allowed = await client.options(path, headers={"Origin": PAGE, **PREFLIGHT})
            assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
            assert "authorization" in allowed.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in allowed.headers
            refused = await client.options(path, headers={"Origin": "https://evil.example.com", **PREFLIGHT})
            assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": PAGE, **token})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        error = await client.post("/v1/completions", json={}, headers={"Origin": PAGE})
        assert (error.status_code, error.headers["access-control-allow-origin"]) == (401 if has_tokens else 400, PAGE)
        foreign = await client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"Origin": "https://evil.example.com"}
        )
        assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_without_the_flag_a_preflight_is_told_of_it(auth: Path, *, has_tokens: bool) -> None:
    async with asked_of("", auth=auth if has_tokens else None) as (client, _):
        for path in ("/v1/chat/completions", "/v1/models", "/metrics"):
            refused = await client.options(path, headers={"Origin": PAGE, **PREFLIGHT})
            assert refused.status_code == 405
            assert "--allowed_origins" in refused.json()["error"]["message"]
        assert "--allowed_origins" not in (await client.get("/v1/completions", headers={"Origin": PAGE})).text


async def test_metrics_of_their_own_port_stay_behind_the_token(auth: Path) -> None:
    """The port for metrics asks for a token with every HTTP method, since every method gets the metrics there."""
    async with served(PortSecurity(auth_file=auth)) as at, httpx.AsyncClient() as client:
        answer = await client.options(f"http://127.0.0.1:{at.metrics}/metrics", headers={"Origin": PAGE, **PREFLIGHT})
        assert answer.status_code == 401


@pytest.mark.parametrize(
    "origin",
    ["chat.example.com", f"{PAGE}/", f"{PAGE}:443", "http://a:80", "https://Chat.example.com", "null", "https://*.b.c"],
)
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins: .* is not valid as an origin"):
        HttpConfig(allowed_origins=f"{PAGE},{origin}")


def test_origins_of_desktop_programs_and_ports_are_taken() -> None:
    asked = "*, http://localhost:3000,tauri://localhost,chrome-extension://abcdefgh,https://[::1]:8443"
    assert len(HttpConfig(allowed_origins=asked).origins) == 5


@contextmanager
def page_of_another_origin(folder: Path) -> Generator[str, None, None]:
    """Serve a folder as another program would; yield the origin of its pages."""
    (folder / "index.html").write_text("<!doctype html><title>another origin</title>")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
async def test_a_browser_reads_a_stream_from_another_origin_if_it_is_named(auth: Path, tmp_path: Path) -> None:
    asking = {"Content-Type": "application/json", "Authorization": f"Bearer {token_of('alice')}"}
    call = {"method": "POST", "headers": asking, "body": json.dumps({"prompt": "x", "stream": True})}
    with page_of_another_origin(tmp_path) as origin:
        async with browser_page(tmp_path / "profile") as page:
            for origins, expected in ((origin, "[DONE]"), (PAGE, "Failed to fetch"), ("", "Failed to fetch")):
                async with asked_of(origins, auth=auth) as (_, port):
                    await page.visit(origin)
                    url = f"http://127.0.0.1:{port}/v1/completions"
                    script = (
                        f"fetch({json.dumps(url)}, {json.dumps(call)}).then((a) => a.text()).catch((e) => e.message)"
                    )
                    assert expected in await page.run(script)
