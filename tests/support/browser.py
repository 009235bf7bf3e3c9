"""A headless Chromium with one page, driven through its debugging pipe instead of a driver such as chromedriver."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
START_TIMEOUT_S = 60.0


class Page:
    """A tab of a headless browser, with the URLs that it has requested and the errors on its console."""

    def __init__(self, reader: asyncio.StreamReader, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.requested: list[str] = []  # every address the page has asked for
        self.complaints: list[str] = []  # errors on its console

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; return its result, and note the events that come before it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Network.requestWillBeSent":
            self.requested.append(event["params"]["request"]["url"])
        elif event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(event["params"]))

    async def attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        session = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def visit(self, url: str) -> None:
        """Load a URL in this tab, and forget the requests and console errors of earlier pages."""
        await self.open("about:blank")
        self.requested.clear()
        self.complaints.clear()
        await self.open(url)

    async def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page, awaiting a promise; return its value as JSON data."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str, *, timeout_s: float = 30.0) -> None:
        """Wait until a JavaScript expression is true in the page; raise TimeoutError after `timeout_s` seconds."""
        async with asyncio.timeout(timeout_s):
            while not await self.run(script):  # noqa: ASYNC110 - the browser has no event for it
                await asyncio.sleep(0.05)

    async def screenshot(self, *, width: int, height: int) -> bytes:
        """Return the page as a PNG of `width` by `height` pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def browser_page(profile: Path) -> AsyncGenerator[Page, None]:
    """Start a browser that stores its profile in the directory `profile`; yield its tab, and stop it afterwards."""
    assert CHROMIUM is not None
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    command = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'  # the pipe has fixed numbers
    arguments = (CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank")
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        command,
        "bash",
        *arguments,
        pass_fds=(commands_out, answers_in),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(commands_out)
    os.close(answers_in)
    reader = asyncio.StreamReader(limit=64 * 2**20)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers_out, "rb", 0)
    )
    try:
        page = Page(reader, commands_in)
        async with asyncio.timeout(START_TIMEOUT_S):
            await page.attach()
        yield page
    finally:
        transport.close()
        os.close(commands_in)
        process.terminate()
        await process.wait()
