"""Tests of clients fetched from npm and PyPI, in whole loops: ask, call a tool, send the result back, ask again.

The server has the models in this repository, which never learned tools: a grammar forces the calls. Tests of clients
that are in the tests' own environment are in tests/unit/gateway/test_sent_back.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.serving.processes import free_port
from tests.support.servers import fused_server, until_healthy
from tests.support.tools import Forecast
from tests.world import packages

pytestmark = [pytest.mark.world, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncGenerator[str, None]:
    port = free_port()
    async with fused_server(BUNDLED_TARGET, BUNDLED_DRAFT, "--http_port", str(port), "--batch", "2"):
        await until_healthy(port)
        yield f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
async def test_instructor(url: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library Instructor gets an answer as a Pydantic model; it runs in another process, which can import it."""
    script = (
        "import sys, instructor, openai, pydantic\n"
        "class Forecast(pydantic.BaseModel):\n"
        "    model_config = pydantic.ConfigDict(extra='forbid')\n"
        "    days: int = pydantic.Field(ge=1, le=9)\n"
        "    rain: bool\n"
        "client = openai.OpenAI(base_url=sys.argv[1], api_key='none', max_retries=0)\n"
        "patched = instructor.from_openai(client, mode=instructor.Mode[sys.argv[2]])\n"
        "asked = dict(model='target', response_model=Forecast, max_tokens=80, temperature=0, max_retries=0)\n"
        "user = {'role': 'user', 'content': 'Rain?'}\n"
        "found, whole = patched.chat.completions.create_with_completion(messages=[user], **asked)\n"
        "print(found.model_dump_json())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(packages.python()))
    printed = await printed_by(sys.executable, "-W", "ignore", "-c", script, url, mode)
    assert Forecast.model_validate(printed)


@pytest.mark.parametrize("name", ["openai", "openai streamed", "vercel", "vercel streamed"])
async def test_javascript(url: str, name: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = packages.javascript()
    printed = await printed_by("node", str(Path(__file__).with_name("clients.mjs")), url, name, str(folder))
    assert 1 <= printed["call"]["days"] <= 9
    assert isinstance(printed["text"], str)


async def printed_by(*words: str) -> Any:
    """Run a program, which must succeed; return the JSON in the last line that it prints."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(240):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    return json.loads(output.decode().splitlines()[-1])
