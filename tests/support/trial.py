"""Runner of the suites in tests/suites: checks promises within a time limit, and prints progress and results."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import print_json, print_table

TO_CLEAN_UP_S = 90.0
"""Seconds within which the servers must end; after them, the suite's process prints where it hung, and ends."""
QUIET_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A row of a suite's results: a promise, what was measured, its limit, and whether the promise was kept."""

    name: str
    measured: str
    limit: str
    kept: bool


class Trial:
    """One run of a suite, which ends with a table of its promises and whether they were kept.

    Attributes:
        results: figures for the JSON line.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: dict[str, Any] = {}
        self._promises: list[Promise] = []
        self._began = time.monotonic()
        self._spoke = -QUIET_S

    def say(self, text: str) -> None:
        """Print the current step in the line of progress, over the previous one."""
        now = time.monotonic()
        line = f"[{now - self._began:4.0f} s] {self.name}: {text}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line[:150]}", end="", file=sys.stderr, flush=True)
        elif now - self._spoke >= QUIET_S:
            self._spoke = now
            print(line, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print a line that the line of progress does not overwrite."""
        print(("\r\x1b[K" if sys.stderr.isatty() else "") + text, file=sys.stderr, flush=True)

    def promise(self, name: str, measured: object, limit: object, *, kept: bool) -> None:
        """Record a promise, what was measured, its limit, and whether it was kept."""
        self._promises.append(Promise(name, str(measured), str(limit), kept))

    def conclude(self) -> int:
        """Print the table of promises and the line of JSON; return 0 if all promises were kept, else 1."""
        if sys.stderr.isatty():
            print(file=sys.stderr)
        rows = [[one.name, one.measured, one.limit, "kept" if one.kept else "BROKEN"] for one in self._promises]
        print_table(f"{self.name}, {time.monotonic() - self._began:.0f} s", ["promise", "measured", "limit", ""], rows)
        kept = bool(self._promises) and all(one.kept for one in self._promises)
        promises = [asdict(one) for one in self._promises]
        print_json(self.name, {"kept": kept, "promises": promises, **self.results})
        return 0 if kept else 1


def parser_of(doc: str | None, **defaults: tuple[Any, str]) -> argparse.ArgumentParser:
    """Return a suite's parser: one flag per default, with the default's type and a help text, and --seed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="(drawn at random)")
    return parser


def run(name: str, body: Callable[[Trial], Awaitable[None]], *, limit_s: float) -> int:
    """Run a suite to its end, SIGTERM or `limit_s` seconds, even if it hangs; return its exit code."""
    trial = Trial(name)
    faulthandler.dump_traceback_later(limit_s + TO_CLEAN_UP_S, exit=True)
    try:
        asyncio.run(_within(trial, body, limit_s))
    except asyncio.CancelledError:
        trial.note("SIGTERM: the servers are stopped")
        return 128 + signal.SIGTERM
    finally:
        faulthandler.cancel_dump_traceback_later()
    return trial.conclude()


async def _within(trial: Trial, body: Callable[[Trial], Awaitable[None]], limit_s: float) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def end() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)  # a second one must not disturb the stopping
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        async with asyncio.timeout(limit_s):
            await body(trial)
    except TimeoutError:
        trial.promise("it ends", "it did not", f"{limit_s:.0f} s", kept=False)
