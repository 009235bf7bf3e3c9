"""End of a process after its work is done."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from specdec.inference.config import ROOT

DONE = """
import asyncio, concurrent.futures, sys, time
import specdec.inference.cli.app as app
import specdec

async def work():
    asyncio.get_running_loop().run_in_executor({executor}, time.sleep, 600)
    return 3

app.main = lambda arguments: app._run(work())
sys.exit(specdec.main())
"""


@pytest.mark.parametrize("executor", ["None", "concurrent.futures.ThreadPoolExecutor(1)"])
def test_an_endless_thread_does_not_delay_the_end(executor: str) -> None:
    """A drained process ends, even if one of its threads does not.

    It was once otherwise: a thread at a silent DNS server, or in an endless template, held a drained process for
    minutes.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", DONE.format(executor=executor)], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert time.monotonic() - began < 30
    assert done.returncode == 3
    assert "a thread that is still at work" in done.stderr
