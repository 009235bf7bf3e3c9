"""Group of processes that a server leads: none of them outlives it, and a terminal's signals reach only the one before it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

END_S = 5.0
"""Seconds that processes of the group get to end, once asked."""


async def end_others() -> None:
    """End what is left of vLLM's processes: all others of this process's group, if it leads one."""
    if os.getpgrp() != os.getpid():
        return
    for number, wait_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 0.0)):
        for process in _others():
            with suppress(ProcessLookupError):
                os.kill(process, number)
        end = time.monotonic() + wait_s
        while _others() and time.monotonic() < end:
            await asyncio.sleep(0.05)


def _others() -> list[int]:
    """Return the other processes of this one's group, but for those that have ended and were not waited for."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = file.read_text().rpartition(")")[2].split()
            if int(group) == os.getpgrp() and state != "Z" and int(file.parent.name) != os.getpid():
                found.append(int(file.parent.name))
    return found


async def in_own_group(lifeline: str | None) -> int:
    """Run this command again as the leader of a session of its own, and pass signals on; return its exit code.

    Ctrl-C reaches every process of a terminal's group, and vLLM's would end at once; here it reaches this process alone,
    and the server drains. When the server has ended, however that was, the rest of its group ends too. It also drains
    when this process has ended, by the end of its stdin.

    Args:
        lifeline: the server's setting of that name; its stdin is then this process's.
    """
    flags = [] if lifeline else ["--lifeline=stdin"]
    arguments = [*sys.orig_argv[1:]]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *[*arguments[:end], *flags, *arguments[end:]],
        stdin=None if lifeline else asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, process.send_signal, number)
    code = await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(round(END_S / 0.05)):
            await asyncio.sleep(0.05)
            os.killpg(process.pid, 0)
        os.killpg(process.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def leads_group() -> bool:
    """Return whether this process leads a session, so that its group holds no other server."""
    return os.getsid(0) == os.getpid()
