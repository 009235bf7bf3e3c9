"""Commands of an older wheel, which has protocol version 1, work with those of this version, as CHANGELOG.md promises.

The wheel is built from the last commit before version 2, which a shallow clone lacks.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.health import is_serving
from specdec.inference.commit import Delta, Started
from specdec.inference.config import ROOT
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import free_port
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest, Resume
from tests.conftest import ModelDirectories
from tests.support.servers import command, complete, draft_server, run_command, target_server, until_healthy

pytestmark = [pytest.mark.long, pytest.mark.release]

COMMIT = "fe5e1e21"
REQUEST = CompletionRequest("the wind", SamplingParams(temperature=0.8), seed=3, max_new_tokens=40)
ASKED = (
    *("--prompt", "the wind", "--temperature", "0.8", "--seed", "3", "--max_new_tokens", "40"),
    *("--format", "json"),
)
SLOW = ("--emulate", "target:5ms")
"""Flags that slow the target's passes, so that a draft of the same size has time to propose."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this project's last commit with protocol version 1; return the folder where it is unpacked."""
    home = tmp_path_factory.mktemp("old")
    source, packages = home / "source", home / "packages"
    source.mkdir()
    sources = subprocess.run(["git", "-C", ROOT, "archive", COMMIT], capture_output=True, check=False)
    if sources.returncode:
        pytest.skip(f"the history of this clone ends before {COMMIT}: git fetch --unshallow brings it")
    subprocess.run(["tar", "-x", "-C", source], input=sources.stdout, check=True)
    offline = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", home, source], check=True)
    with zipfile.ZipFile(next(home.glob("*.whl"))) as wheel:
        wheel.extractall(packages)
    return packages


def started(old: Path, *arguments: str | Path) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Run a command of the older wheel (protocol version 1) until the block ends; yield its process."""
    return command(*arguments, program="-m specdec", cwd=old, variables={"PYTHONPATH": str(old)})


async def run_old(old: Path, *arguments: str | Path) -> str:
    """Run a command of the older wheel (protocol version 1) to its end; return its standard output and errors."""
    async with started(old, *arguments) as process, asyncio.timeout(90):
        return b"".join(await process.communicate()).decode()


@asynccontextmanager
async def old_target(old: Path, model: Path) -> AsyncGenerator[str, None]:
    """Run a target of the older wheel (protocol version 1); yield its address once it is ready."""
    address = f"127.0.0.1:{free_port()}"
    flags = ("--model", model, "--port", address.split(":")[1], "--threads", "1", *SLOW)
    async with started(old, "target", *flags) as process, open_channel(address) as channel, asyncio.timeout(90):
        while not await is_serving(channel):
            assert process.returncode is None
            await asyncio.sleep(0.1)
        yield address


def ids_in(output: str) -> list[list[int]]:
    """Return the token ids of each answer in what a command has printed with `--format json`."""
    return [[int(each) for each in found.split(",")] for found in re.findall(r'"token_ids": \[([^\]]+)\]', output)]


async def test_clients_of_version_1(old: Path, models: ModelDirectories) -> None:
    """Clients of the older wheel (protocol version 1) get this target's tokens.

    A draft of the older wheel, whose way of verification no longer exists, gets an error that names the present one.
    """
    async with target_server(models.target, *SLOW) as target:
        expected = await complete(target, REQUEST)
        port = ("--port", str(target.port))
        assert ids_in(await run_old(old, "fused_client", *port, *ASKED)) == [expected.token_ids]
        http_port = free_port()
        async with started(old, "gateway", "--target_host", target.address, "--http_port", str(http_port)):
            await until_healthy(http_port)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as client:
                body = {"prompt": REQUEST.prompt, "temperature": 0.8, "seed": 3, "max_tokens": 40}
                answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == expected.text
        output = await run_old(old, "draft", "--model", models.related, *port, *ASKED)
        assert "Generate" in output
        assert "Assist" in output


async def test_a_pool_worker_of_version_1_helps(old: Path, models: ModelDirectories) -> None:
    async with target_server(models.target, *SLOW) as target:
        alone = await complete(target, replace(REQUEST, gamma=0))
        worker = ("draft", "--model", models.related, "--attach", target.address, "--threads", "1")
        async with started(old, *worker), asyncio.timeout(90):
            helped = alone
            while helped.num_accepted_tokens == 0:
                helped = await complete(target, REQUEST)
                assert helped.token_ids == alone.token_ids


async def test_a_target_of_version_1(old: Path, models: ModelDirectories) -> None:
    """A target of the older wheel (protocol version 1) answers this version's clients, without draft tokens.

    A draft worker of this version for the target's pool ends with an error.
    """
    async with old_target(old, models.target) as address, target_server(models.target) as ours:
        expected = await complete(ours, REQUEST)
        assert (await complete(address, REQUEST)).token_ids == expected.token_ids
        theirs = replace(ours, address=address)
        async with draft_server(models.related, theirs) as edge:
            at_edge = await complete(edge, REQUEST)
            assert (at_edge.token_ids, at_edge.num_accepted_tokens) == (expected.token_ids, 0)
        worker = await run_command("--role", "draft", "--model", models.related, "--attach", address, "--threads", "1")
        assert worker.code != 0
        assert "protocol version 2" in worker.last_line


async def test_an_answer_goes_on_at_the_other_version(old: Path, models: ModelDirectories) -> None:
    async with old_target(old, models.target) as theirs, target_server(models.target) as target:
        ours = target.address
        expected = await complete(ours, REQUEST)
        for first, second in ((theirs, ours), (ours, theirs)):
            token_ids: list[int] = []
            async with open_channel(first) as channel:
                completer = RemoteCompleter(channel, first, deadline_s=60.0)
                async with aclosing(completer.complete(REQUEST)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            origin = event.provenance
                        if isinstance(event, Delta):
                            token_ids += event.token_ids
                        if len(token_ids) >= 10:
                            break
            rest = await complete(second, replace(REQUEST, resume=Resume(tuple(token_ids), origin)))
            assert [*token_ids, *rest.token_ids] == expected.token_ids
