"""Tests of targets whose vLLM engine core starts by spawn, as on a CPU, or by fork, as it may elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest

from specdec.inference.vllm.group import members
from tests.vllm.conftest import FLAGS, Pair
from tests.vllm.test_servers import command_of

pytestmark = [pytest.mark.timeout(2400), pytest.mark.release]

LIMIT_S = 900.0
"""Most seconds that a step may take, which is an import of vLLM or two; a quiet machine needs ten."""

MAIN = """
import os, sys
from vllm.platforms.cpu import CpuPlatform
from specdec.inference.cli.app import main
own, method = CpuPlatform.check_and_update_config, sys.argv.pop(1)
def checked(config):
    own(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
CpuPlatform.check_and_update_config = staticmethod(checked)
sys.exit(main(sys.argv[1:]))
"""
"""Program that runs a role of this project with the start method in its first argument."""


@asynccontextmanager
async def target(pair: Pair, method: str) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Start a target in a process group of its own; when the block ends, kill what is left of the group."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        MAIN,
        method,
        *("--role", "target", "--engine", "vllm", "--model", str(pair.target), "--port", "0", "--ready_json"),
        "--",
        *FLAGS,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for each in members(process.pid):
            os.kill(each, signal.SIGKILL)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_empty(group: int) -> None:
    """Wait until no process of the process group is left."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if not members(group):
                return
            await asyncio.sleep(0.1)


def has_core(group: int) -> bool:
    """Return whether the process group has a vLLM engine core, or a process that is about to become one."""
    for each in members(group):
        with suppress(OSError):  # it has ended meanwhile
            if any(part in command_of(each) for part in (b"EngineCore", b"spawn_main")):
                return True
    return False


@pytest.mark.parametrize("method", ["spawn", "fork"])
async def test_sigterm_ends_a_ready_target_with_code_0(pair: Pair, method: str) -> None:
    """SIGTERM ends a ready target with exit code 0, and leaves no process.

    Regression: with fork, the core shared the pipe by which the event loop hears of signals. vLLM ends its core by
    SIGTERM, which the target took for a second one: it ended at once with code 143.
    """
    async with target(pair, method) as process:
        assert process.stdout is not None
        assert b'"ready": true' in await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        await until_empty(process.pid)


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_target_that_ends_while_it_starts_leaves_no_core(
    pair: Pair, method: str, number: signal.Signals
) -> None:
    """A target that is killed, or gets SIGTERM, while its engine core loads the model leaves no process.

    Regression: with fork, the core itself had the listening socket that it called to reach the target. So its call was
    answered, and it stayed for ever with its memory.
    """
    async with target(pair, method) as process:
        async with asyncio.timeout(LIMIT_S):
            while not has_core(process.pid):
                assert process.returncode is None
                await asyncio.sleep(0.05)
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), LIMIT_S)
        await until_empty(process.pid)
