"""What makes a server's process end: signals, and the end of stdin."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress

_STOPPING = (signal.SIGTERM, signal.SIGINT)


async def stop_signal() -> signal.Signals:
    """Wait for SIGTERM or SIGINT; return which one came."""
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in _STOPPING:
        loop.add_signal_handler(number, received.put_nowait, number)
    return await received.get()


async def stdin_ended() -> None:
    """Wait for the end of stdin. A daemon thread reads it, which does not keep the process alive."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        with suppress(OSError):  # it was closed before
            while os.read(0, 4096):
                pass
        with suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, name="lifeline", daemon=True).start()
    await ended.wait()


def end_at_once_on_signal() -> None:
    """Let SIGTERM and SIGINT from now on end the process at once, with one line on stderr."""

    def end(number: signal.Signals) -> None:
        print(f"{number.name} again: ended at once", file=sys.stderr, flush=True)
        os._exit(128 + number)

    loop = asyncio.get_running_loop()
    for number in _STOPPING:
        loop.add_signal_handler(number, end, number)
