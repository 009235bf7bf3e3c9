"""When a test suite ends, all processes that it has started end too."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

SUITE = """
import asyncio, sys
from tests.support.trial import run

async def body(trial):
    server = await asyncio.create_subprocess_exec("sleep", "600", stdout=asyncio.subprocess.DEVNULL)
    try:
        print(server.pid, flush=True)
        await server.wait()
    finally:
        server.kill()
        await server.wait()

sys.exit(run("suite", body, limit_s=600))
"""


async def test_servers_of_a_suite_end_with_it() -> None:
    """The servers that a suite has started end with it.

    Regression: SIGTERM, as CI sends it after a time limit, ended a suite at once, and its servers ran on.
    """
    suite = await asyncio.create_subprocess_exec(sys.executable, "-c", SUITE, stdout=asyncio.subprocess.PIPE)
    assert suite.stdout is not None
    try:
        async with asyncio.timeout(60):
            server = int(await suite.stdout.readline())
            suite.send_signal(signal.SIGTERM)
            assert await suite.wait() == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)
    finally:
        if suite.returncode is None:
            suite.kill()
            await suite.wait()
