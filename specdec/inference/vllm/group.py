"""Process group that a server leads: no member outlives the server, and a terminal's signals do not reach the group."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from specdec.inference.errors import ConfigError, SpecDecError

END_S = 4.0
"""Seconds that processes of the group get to end, once asked."""
TRACKER = b"resource_tracker import main"
"""Part of the command line of Python's resource tracker; the module's name also stands in vLLM's warning filter."""


def leads_group() -> bool:
    """Return whether this process leads a session, so that its group holds no other server."""
    return os.getsid(0) == os.getpid()


def members(group: int) -> list[int]:
    """Return the ids of the processes of a process group that still run.

    This process is left out, and so are Python's trackers of shared memory.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, number, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            is_other = int(number) == group and state not in "ZX" and int(folder.name) != os.getpid()
            if is_other and TRACKER not in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def end_members(group: int, wait_s: float = END_S) -> None:
    """End the other processes of a process group: send SIGTERM, and after `wait_s` seconds kill those that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in members(group):
            with suppress(ProcessLookupError):
                os.kill(process, number)
        end = time.monotonic() + wait_s
        while members(group) and time.monotonic() < end:
            time.sleep(0.05)


def leave(error: SpecDecError | None) -> NoReturn:
    """Print the error, if there is one, and end this process at once, since unloading vLLM takes seconds.

    The exit code is 0 without an error, 2 for a ConfigError and 1 for any other error.
    """
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
    sys.stdout.flush()
    logging.shutdown()
    os._exit(0 if error is None else 2 if isinstance(error, ConfigError) else 1)


async def in_own_group(lifeline: str | None) -> int:
    """Run this command again as a child that leads a new session, and pass signals on to it; return its exit code.

    Ctrl-C reaches all processes of a terminal's group, and vLLM's processes would end at once. Here it reaches only
    this process, and the child drains. When the child has ended, the rest of its group is ended too. If this process
    dies, the child's stdin ends, so that the child drains.

    Args:
        lifeline: the server's setting of that name; if it is set, the child gets this process's stdin.
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
    await asyncio.to_thread(end_members, process.pid)
    return code if code >= 0 else 128 - code
