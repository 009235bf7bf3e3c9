"""The page in a browser, in front of answers whose timing is known."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inference.config import ServerConfig
from inference.errors import ContextLengthError
from inference.gateway.server import HttpFront
from inference.serving.host import opened
from inference.serving.processes import free_port
from tests.support.browser import CHROMIUM, Page, browser_page
from tests.support.completers import ScriptedCompleter, gateway

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)"),
]


@asynccontextmanager
async def page_of(completer: ScriptedCompleter, directory: Path, **settings: Any) -> AsyncGenerator[Page, None]:
    port = free_port()
    async with (
        opened(HttpFront(gateway(completer, port=port, **settings), ServerConfig(grace_s=1.0))),
        browser_page(directory) as page,
    ):
        await page.open(f"http://127.0.0.1:{port}/")
        await page.until("document.getElementById('model').textContent.includes('128 tokens')")
        yield page


async def text_of(page: Page, name: str) -> str:
    return str(await page.run(f"document.getElementById('{name}').textContent"))


async def test_tokens_per_second_counts_all_time(tmp_path: Path) -> None:
    """The story: tokens that came with the first were counted, and the time until the first was not."""
    completer = ScriptedCompleter([["a"] * 6] * 2, gap_s=0.5)
    async with page_of(completer, tmp_path) as page:
        started = time.monotonic()
        await page.run("document.getElementById('form').requestSubmit()")
        await page.until("document.getElementById('finish').textContent === 'length'")
        elapsed_s = time.monotonic() - started
        assert await text_of(page, "tokens") == "12"
        assert 12 / elapsed_s <= float(await text_of(page, "speed")) <= 12 / (2 * 0.5)


async def test_reasoning_is_shown_above_the_answer(tmp_path: Path) -> None:
    """The story: the page read the content alone, so a model that reasons seemed to answer nothing."""
    completer = ScriptedCompleter([["<think>", "It is "], ["even.", "</think>"], ["Yes", "."]])
    async with page_of(completer, tmp_path, reasoning_parser="think") as page:
        await page.run("document.getElementById('mode').value = 'chat'")
        await page.run("document.getElementById('form').requestSubmit()")
        await page.until("document.getElementById('finish').textContent === 'length'")
        spans = "[...document.querySelectorAll('#output span')]"
        thought = f"{spans}.filter((each) => each.className === 'thought')"
        assert await page.run(f"{thought}.map((each) => each.textContent).join('')") == "It is even."
        assert await text_of(page, "output") == "It is even.Yes."
        colour = await page.run(f"getComputedStyle({thought}[0]).color")
        assert colour == await page.run("getComputedStyle(document.getElementById('model')).color")


async def test_a_refused_prompt_does_not_fill_the_answer(tmp_path: Path) -> None:
    refusing = ScriptedCompleter([], error=ContextLengthError("This model's maximum context length is 128 tokens"))
    async with page_of(refusing, tmp_path) as page:
        await page.run("document.getElementById('form').requestSubmit()")
        await page.until("document.getElementById('failure').textContent.includes('maximum context length')")
        assert await text_of(page, "output") == ""
        assert await page.run("document.getElementById('output').className") == "empty"


async def test_what_is_typed_does_not_look_like_a_placeholder(tmp_path: Path) -> None:
    """The story: fields took the faint colour of their labels, so that 0.7 looked like an example."""
    async with page_of(ScriptedCompleter([]), tmp_path) as page:
        colour = "getComputedStyle(document.getElementById('{}'){}).color"
        typed = await page.run(colour.format("temperature", ""))
        assert typed == await page.run("getComputedStyle(document.body).color")
        assert typed != await page.run(colour.format("seed", ", '::placeholder'"))


async def test_a_lost_connection_is_shown_beside_what_has_come(tmp_path: Path) -> None:
    completer = ScriptedCompleter([["w0 "], ["w1 "]], gap_s=0.02)
    completer.hangs = True
    front = HttpFront(gateway(completer, port=(port := free_port())), ServerConfig(grace_s=1.0))
    async with opened(front), browser_page(tmp_path) as page:
        await page.open(f"http://127.0.0.1:{port}/")
        await page.run("document.getElementById('form').requestSubmit()")
        await page.until("document.getElementById('output').textContent.endsWith('w1 ')")
        pull_the_plug(front)
        await page.until("document.getElementById('failure').textContent !== ''")
        assert (await text_of(page, "output")).endswith("w0 w1 ")


def pull_the_plug(front: HttpFront) -> None:
    for server in front._server.servers:
        server.close()
    for connection in list(front._server.server_state.connections):
        connection.transport.abort()
