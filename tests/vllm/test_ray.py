"""Test of `Child` in deploy/ray, by which a Ray supervisor controls a target's process; real vLLM, no Ray."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from deploy.ray.child import Child
from specdec.inference.vllm.group import members
from tests.vllm.conftest import FLAGS, Pair

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


async def test_a_hung_server_is_killed_with_its_engine(pair: Pair) -> None:
    """When a supervisor kills a server that hangs, its vLLM engine ends, too.

    Regression: the supervisor's child had started the server, so killing the child left server and engine.
    """
    flags = [f"--engine_flag={flag}" for flag in FLAGS]
    child = await Child.start("target", ["--engine", "vllm", "--model", str(pair.target), "--port", "0", *flags])
    try:
        assert await child.is_alive()
        assert (await child.load()).num_slots == 4
        assert len(members(child.pid)) > 1
        os.kill(child.pid, signal.SIGSTOP)
    finally:
        child.kill()
    assert await child.ended() == -signal.SIGKILL
    async with asyncio.timeout(120):
        while members(child.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
