"""What makes a process end: signals, the end of stdin, and a time-out at which it ends although threads still work."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_STOPPING = (signal.SIGTERM, signal.SIGINT)


def end_after(seconds: float, code: int, report: Callable[[], None]) -> threading.Timer:
    """Start a timer that ends the process without waiting for its threads; return the timer.

    Args:
        code: exit code.
        report: function to call before the end, such as one that writes a line of the log.
    """
    timer = threading.Timer(seconds, _end, (code, report))
    timer.daemon = True
    timer.start()
    return timer


def _end(code: int, report: Callable[[], None]) -> None:
    report()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


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
