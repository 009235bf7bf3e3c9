"""The gateway's web page in a browser, with answers of known text and timing."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import re
import shlex
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from specdec.inference.commit import Delta, TextEvent
from specdec.inference.config import ServerConfig
from specdec.inference.errors import ContextLengthError
from specdec.inference.gateway.app import LIBRARY, PAGE, HttpFront
from specdec.inference.serving.host import opened
from specdec.inference.serving.processes import free_port
from specdec.inference.text.chat import Chat
from specdec.inference.workers.completion import CompletionRequest
from tests.support.browser import CHROMIUM, Page, browser_page
from tests.support.completers import REJECTED, ScriptedCompleter, gateway

in_browser = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)"),
]
DIGEST = "391f2aa638e75e6c7859d0a5c5650ef0956722a45998f17e05b83bc655778e1e"
"""SHA-256 of dist/browser/markdown-it.umd.min.js in markdown-it 15.0.3 from npm."""
HOSTILE = """<script>window.harm = 1</script><img src=x onerror="window.harm = 2"><svg/onload=window.harm=3>

![picture](http://127.0.0.1:9/picture.png) ![](javascript:window.harm=4) <http://127.0.0.1:9/auto>

[one](javascript:window.harm=5) [two](JaVaScRiPt:window.harm=6) [three](data:text/html,<script>window.harm=7</script>)
[four](vbscript:x) [five](&#106;avascript:window.harm=8) [six](/local "onmouseover=window.harm=9") [seven](http://127.0.0.1:9/)

<iframe srcdoc="<script>parent.harm = 10</script>"></iframe><style>* { display: none }</style>
<form action=http://127.0.0.1:9/><input name=go autofocus onfocus=window.harm=11></form>

| a | <b>b</b> |
|---|---|
| `<img src=x>` | **c** |

```html
</pre><script>window.harm = 12</script>
```

# Heading
- *item*
> quote
"""
SHOWN = {"DIV", "SPAN", "P", "A", "H1", "UL", "LI", "BLOCKQUOTE", "PRE", "CODE", "EM", "STRONG"}
SHOWN |= {"TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}


def at(name: str) -> str:
    return f"document.getElementById('{name}')"


def finished(reason: str = "length") -> str:
    return f"{at('finish')}.textContent === '{reason}'"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Page, None]:
    async with browser_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@asynccontextmanager
async def page_of(completer: ScriptedCompleter, page: Page, **settings: Any) -> AsyncGenerator[str, None]:
    """Open in `page` the web page of a gateway over this completer; yield its address."""
    port = free_port()
    async with opened(HttpFront(gateway(completer, port=port, **settings), ServerConfig(grace_s=1.0))):
        await page.visit(f"http://127.0.0.1:{port}/")
        await page.until(f"{at('model')}.textContent.includes('128 tokens')")
        yield f"http://127.0.0.1:{port}/"


async def send(page: Page, prompt: str = "prompt", **fields: object) -> None:
    """Fill in the form of the web page, and submit it; `fields` are values by name of an input."""
    for name, value in {"prompt": prompt, **fields}.items():
        await page.run(f"{at(name)}.value = {json.dumps(value)}")
    await page.run(f"{at('mode')}.dispatchEvent(new Event('change')); {at('form')}.requestSubmit()")


async def text_of(page: Page, name: str) -> str:
    return str(await page.run(f"{at(name)}.textContent"))


def test_the_page_is_small_and_its_library_is_the_published_one() -> None:
    assert len(PAGE.read_text().splitlines()) <= 600
    assert hashlib.sha256(LIBRARY.read_bytes()).hexdigest() == DIGEST
    licences = LIBRARY.with_name("markdown-it.LICENSE.txt").read_text()
    for name in ("markdown-it", "entities", "linkify-it", "mdurl", "punycode.js", "uc.micro"):
        assert f"= {name} " in licences


class TestInBrowser:
    pytestmark = in_browser

    async def test_tokens_per_second_counts_all_time(self, browser: Page) -> None:
        """The page computes tokens/s from all tokens and the whole time of an answer.

        Regression: it counted the tokens of the first message, but not the time until that message.
        """
        async with page_of(ScriptedCompleter([["a"] * 6] * 2, gap_s=0.5), browser):
            started = time.monotonic()
            await send(browser)
            await browser.until(finished())
            elapsed_s = time.monotonic() - started
            assert await text_of(browser, "tokens") == "12"
            for name in ("acceptance", "per_pass", "ttft"):
                assert (await text_of(browser, name))[:1].isdigit(), name
            assert 12 / elapsed_s <= float(await text_of(browser, "speed")) <= 12 / (2 * 0.5)

    async def test_reasoning_is_shown_above_the_answer(self, browser: Page) -> None:
        """The page shows a model's reasoning above its answer.

        Regression: the page showed content alone, so a model that reasons seemed to answer nothing. Later it showed
        the reasoning in grey, without saying what it was, and without the colours of draft tokens.
        """
        completer = ScriptedCompleter([["<think>", "It is "], ["even.", "</think>"], ["Yes", "."]])
        async with page_of(completer, browser, reasoning_parser="think"):
            await send(browser, mode="chat")
            await browser.until(finished())
            parts = "[...document.querySelector('.answer').children].map((each) => each.textContent)"
            assert await browser.run(parts) == ["ThinkingIt is even.", "Yes."]
            kinds = "[...document.querySelectorAll('.thought span')].map((each) => each.className)"
            assert set(await browser.run(kinds)) == {"drafted", "own"}
            shade = "(name) => getComputedStyle(document.querySelector(name)).backgroundColor"
            assert len(set(await browser.run(f"['.thought .drafted', '.legend .drafted'].map({shade})"))) == 1
            await browser.run("document.querySelector('.thought summary').click()")
            assert not await browser.run("document.querySelector('.thought').open")
            colours = "['.thought', '#model'].map((name) => getComputedStyle(document.querySelector(name)).color)"
            assert len(set(await browser.run(colours))) == 1

    async def test_a_refused_prompt_does_not_fill_the_answer(self, browser: Page) -> None:
        refusing = ScriptedCompleter([], error=ContextLengthError("This model's maximum context length is 128 tokens"))
        async with page_of(refusing, browser):
            await send(browser, mode="chat")
            await browser.until(f"{at('failure')}.textContent.includes('maximum context length')")
            assert await browser.run(f"{at('output')}.childNodes.length") == 0
            assert await browser.run(f"{at('prompt')}.value") == "prompt"

    async def test_typed_text_does_not_look_like_a_placeholder(self, browser: Page) -> None:
        """Typed text on the page has another colour than placeholders.

        Regression: typed text had the faint colour of labels, so 0.7 looked like an example.
        """
        async with page_of(ScriptedCompleter([]), browser):
            typed = await browser.run(f"getComputedStyle({at('temperature')}).color")
            assert typed == await browser.run("getComputedStyle(document.body).color")
            assert typed != await browser.run(f"getComputedStyle({at('gamma')}, '::placeholder').color")

    async def test_a_lost_connection_is_shown_beside_the_text_so_far(self, browser: Page) -> None:
        completer = ScriptedCompleter([["w0 "], ["w1 "]], gap_s=0.02)
        completer.hangs = True
        front = HttpFront(gateway(completer, port=(port := free_port())), ServerConfig(grace_s=1.0))
        async with opened(front):
            await browser.visit(f"http://127.0.0.1:{port}/")
            await send(browser)
            await browser.until(f"{at('output')}.textContent.endsWith('w1 ')")
            pull_the_plug(front)
            await browser.until(f"{at('failure')}.textContent !== ''")
            assert (await text_of(browser, "output")).endswith("w0 w1 ")

    async def test_rejected_drafts_are_shown_for_a_moment_and_are_no_text(self, browser: Page) -> None:
        async with page_of(ScriptedCompleter([["a ", "b "], ["c ", "d "]], gap_s=0.1), browser):
            await browser.run(
                "window.seen = new Set(); new MutationObserver((changes) => changes.forEach((change) => "
                "change.addedNodes.forEach((node) => node.tagName === 'DEL' && seen.add(node.dataset.text))))"
                f".observe({at('output')}, {{ childList: true, subtree: true }})"
            )
            await send(browser)
            await browser.until(finished())
            assert await text_of(browser, "output") == "prompta b c d "
            assert await browser.run("[...seen]") == [REJECTED]
            await browser.until("document.querySelectorAll('#output del').length === 0")
            kinds = "[...document.querySelectorAll('#output .tokens span')].map((each) => each.className)"
            assert await browser.run(kinds) == ["prompt", "drafted", "own", "drafted", "own"]
            assert (
                await browser.run(f"[...{at('target_lane')}.children].map((each) => each.textContent)") == ["1/2"] * 2
            )

    async def test_a_chat_has_turns_until_a_new_one_begins(self, browser: Page) -> None:
        completer = ScriptedCompleter([["yes", "."]])
        async with page_of(completer, browser):
            await send(browser, "one?", mode="chat")
            await browser.until(finished())
            await browser.run(f"{at('prompt')}.value = 'two?'; {at('form')}.requestSubmit()")
            await browser.until(f"document.querySelectorAll('.user').length === 2 && {finished()}")
            turns = ("user", "one?"), ("assistant", "yes."), ("user", "two?")
            assert completer.requests[-1].prompt == Chat.of(*turns)
            await browser.run(f"{at('new_chat')}.click()")
            await send(browser, "three?")
            await browser.until(finished())
            assert completer.requests[-1].prompt == Chat.of(("user", "three?"))

    @pytest.mark.parametrize(("is_faulty", "found"), [(False, "identical: 6 of 6"), (True, "NOT identical: 2 of 6")])
    async def test_the_race_compares_tokens(self, browser: Page, is_faulty: bool, found: str) -> None:
        """The page's race of answers with and without drafts warms both up, and runs each twice, in alternating order.

        The page gives the ratio of the speeds as a range.

        Regression: the first request of a fresh server was always the one without drafts, and the page said "14.06
        times as fast" where later races had 0.5 to 4.
        """
        completer = FaultyCompleter([["a ", "b "]] * 3, gap_s=0.05)
        completer.is_faulty = is_faulty
        async with page_of(completer, browser):
            await browser.run(f"{at('seed')}.value = ''; {at('temperature')}.value = 1; {at('start_race')}.click()")
            await browser.until(f"{at('verdict')}.textContent !== ''")
            assert found in await text_of(browser, "verdict")
            assert re.match(r"\d+\.\d( to \d+\.\d)? times as fast · ", await text_of(browser, "verdict"))
            assert [each.gamma for each in completer.requests] == [0, None, 0, None, None, 0]
            assert {each.seed for each in completer.requests} == {int(await text_of(browser, "seed_used"))}
            salts = {each.cache_salt for each in completer.requests}
            assert len(salts) == 6, "a later run would find the prompt read already"
            shown = "getComputedStyle(document.getElementById('output')).display"
            assert await browser.run(shown) == "none", "an empty box between race and figures"

    async def test_unequal_times_of_equal_runs_are_said(self, browser: Page) -> None:
        completer = UnsteadyCompleter([["a ", "b "]] * 3)
        async with page_of(completer, browser):
            await browser.run(f"{at('start_race')}.click()")
            await browser.until(f"{at('verdict')}.textContent !== ''")
            words = await text_of(browser, "verdict")
            assert re.search(r"Equal runs differ by a factor of \d+\.\d: the machine is busy, repeat this$", words)

    async def test_a_race_without_draft_tokens_is_refused(self, browser: Page) -> None:
        """A race (answers with and without drafts) is refused if the number of draft tokens is 0.

        Regression: the race ran with the default number, and the page said "2.79 times as fast".
        """
        completer = ScriptedCompleter([["a "]])
        async with page_of(completer, browser):
            await browser.run(f"{at('gamma')}.value = 0; {at('start_race')}.click()")
            await browser.until(f"{at('failure')}.textContent.startsWith('“Draft tokens” is 0')")
            assert completer.requests == []

    async def test_a_wait_for_the_first_token_is_shown(self, browser: Page) -> None:
        """While a server has not begun to answer, the page shows that it waits.

        Regression: the page did not change until the first token came.
        """
        completer = ScriptedCompleter([["a "]], gap_s=600)
        async with page_of(completer, browser):
            await send(browser)
            await browser.until(f"{at('waiting')}.textContent === 'waiting for the first token, 2 s'")
            await browser.run(f"{at('go')}.click()")
            await browser.until(finished("stopped"))
            assert await text_of(browser, "waiting") == ""

    async def test_a_server_that_is_gone_is_named(self, browser: Page) -> None:
        """If the server is gone, the page says so, and names the server.

        Regression: the page said "Failed to fetch".
        """
        async with page_of(ScriptedCompleter([["a "]]), browser) as address:
            pass
        await send(browser)
        words = f"the server at {address.split('/')[2]} does not answer; is it running?"
        await browser.until(f"{at('failure')}.textContent === {json.dumps(words)}")

    @pytest.mark.parametrize(("mode", "num_requests"), [("chat", 1), ("text", 0)])
    async def test_enter_sends_in_a_chat(self, browser: Page, mode: str, num_requests: int) -> None:
        completer = ScriptedCompleter([["yes"]])
        async with page_of(completer, browser):
            await browser.run(
                f"{at('mode')}.value = {json.dumps(mode)}; {at('mode')}.dispatchEvent(new Event('change'))"
            )
            press = f"{at('prompt')}.dispatchEvent(new KeyboardEvent('keydown', {{ key: 'Enter', bubbles: true%s }}))"
            await browser.run(press % ", shiftKey: true")
            await browser.run(press % "")
            if num_requests:
                await browser.until(finished())
            assert len(completer.requests) == num_requests

    async def test_hostile_output_stays_text(self, browser: Page) -> None:
        """Model output, as tokens or Markdown, runs no script, loads nothing, and links only to addresses it shows."""
        pieces = [HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)]
        async with page_of(
            ScriptedCompleter([pieces[i : i + 4] for i in range(0, len(pieces), 4)]), browser
        ) as address:
            await browser.run(f"{at('formatted')}.click()")
            await send(browser, HOSTILE, mode="chat")
            await browser.until(f"{finished()} && document.querySelector('.markdown h1') !== null")
            await browser.run(f"{at('formatted')}.click(); {at('formatted')}.click()")
            await browser.until(
                "document.querySelector('.markdown blockquote') && !document.querySelector('#output del')"
            )
            names = await browser.run(f"[...{at('output')}.querySelectorAll('*')].map((each) => each.tagName)")
            assert set(names) <= SHOWN
            assert {"H1", "STRONG", "TABLE", "PRE", "EM", "A"} <= set(names)
            links = "[...document.querySelectorAll('#output a')].map((each) => each.getAttribute('href'))"
            plain = {f"http://127.0.0.1:9/{path}" for path in ("", "auto", "picture.png")}  # a picture is a link too
            assert set(await browser.run(links)) == {None, *plain}
            attributes = f"[...{at('output')}.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
            assert set(await browser.run(attributes)) <= {"class", "href", "target", "rel", "title"}
            assert await browser.run("window.harm") is None
            assert all(url.startswith(address) for url in browser.requested)
            assert browser.complaints == []

    async def test_the_policy_refuses_foreign_scripts_and_html(self, browser: Page) -> None:
        """The content security policy refuses foreign scripts, and would protect the page even if text became HTML."""
        async with page_of(ScriptedCompleter([]), browser):
            tries = "() => { document.body.innerHTML = '<p>'; }, () => document.body.setAttribute('onclick', 'x')"
            caught = "(attempt) => { try { attempt(); return 'done' } catch (error) { return error.name } }"
            await browser.run(f"window.refused = [{tries}].map({caught})")
            assert await browser.run("window.refused") == ["TypeError"] * 2

    async def test_the_commands_send_the_same_request(self, browser: Page) -> None:
        prompt = 'it\'s "$HOME" \\n é\u2028'
        async with page_of(ScriptedCompleter([]), browser) as address:
            await browser.run(f"{at('prompt')}.value = {json.dumps(prompt)}; {at('gamma')}.value = 3")
            await browser.run(f"{at('form')}.dispatchEvent(new Event('input'))")
            expected = {"model": "tiny", "prompt": prompt, "max_tokens": 128, "temperature": 0, "seed": 1}
            words = shlex.split(await text_of(browser, "curl"))
            assert (words[:2], json.loads(words[-1])) == (
                ["curl", f"{address}v1/completions"],
                {**expected, "gamma": 3},
            )
            calls = [
                node for node in ast.walk(ast.parse(await text_of(browser, "python"))) if isinstance(node, ast.Call)
            ]
            (create,) = [call for call in calls if ast.unparse(call.func) == "client.completions.create"]
            given = {word.arg: ast.literal_eval(word.value) for word in create.keywords}
            assert given == {**expected, "extra_body": {"gamma": 3}}

    async def test_keys_start_and_stop_and_a_phone_shows_all(self, browser: Page) -> None:
        completer = ScriptedCompleter([["a "]])
        completer.hangs = True
        async with page_of(completer, browser):
            await browser.screenshot(width=360, height=800)
            press = "document.getElementById('prompt').dispatchEvent(new KeyboardEvent('keydown', {}))"
            await browser.run(press.format("{ key: 'Enter', ctrlKey: true, bubbles: true }"))
            await browser.until(f"{at('tokens')}.textContent === '1'")
            await browser.run(press.format("{ key: 'Escape', bubbles: true }"))
            await browser.until(finished("stopped"))
            assert await browser.run("document.documentElement.scrollWidth") <= 360
        await asyncio.sleep(0)
        assert completer.num_running == 0


class FaultyCompleter(ScriptedCompleter):
    """Completer that, while `is_faulty`, gives other tokens with drafts than without, from the third token on."""

    is_faulty = False

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        async for event in super().complete(request):
            is_other = self.is_faulty and request.gamma != 0 and isinstance(event, Delta) and event.position > 4
            yield replace(event, token_ids=(8, 8)) if is_other and isinstance(event, Delta) else event


class UnsteadyCompleter(ScriptedCompleter):
    """Completer whose requests take much longer from the fourth on; the first two of a race are its warm-up."""

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        self._gap_s = 0.5 if len(self.requests) > 3 else 0.05
        async for event in super().complete(request):
            yield event


def pull_the_plug(front: HttpFront) -> None:
    for server in front._server.servers:
        server.close()
    for connection in list(front._server.server_state.connections):
        connection.transport.abort()
