"""Runner of the suites in tests/suites: checks a suite's promises within a time limit, and prints a table of them."""

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
"""Seconds past its limit that a suite has to stop its servers; then it prints where it hangs, and its process ends."""
QUIET_S = 10.0
"""Least seconds between two lines of progress where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A line of a suite's results: something promised, what was measured, the limit, and whether it was kept."""

    name: str
    measured: str
    limit: str
    kept: bool


class Trial:
    """One run of a suite of tests/suites, which ends with a table of promises and whether they were kept.

    Attributes:
        results: further figures for the line of JSON that the run prints at its end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: dict[str, Any] = {}
        self._promises: list[Promise] = []
        self._began = time.monotonic()
        self._spoke = -QUIET_S

    def say(self, text: str) -> None:
        """Print the current step as progress.

        It replaces the previous step on a terminal; elsewhere it is left out within QUIET_S after another line.
        """
        now = time.monotonic()
        line = f"[{now - self._began:4.0f} s] {self.name}: {text}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line[:150]}", end="", file=sys.stderr, flush=True)
        elif now - self._spoke >= QUIET_S:
            self._spoke = now
            print(line, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print a line that stays: later progress does not overwrite it."""
        print(("\r\x1b[K" if sys.stderr.isatty() else "") + text, file=sys.stderr, flush=True)

    def promise(self, name: str, measured: object, limit: object, *, kept: bool) -> None:
        """Record for the final table: something promised, what was measured, the limit, and whether it was kept."""
        self._promises.append(Promise(name, str(measured), str(limit), kept))

    def conclude(self) -> int:
        """Print the table of promises and a line of JSON; return the exit code: 0 if all promises were kept, else 1."""
        if sys.stderr.isatty():
            print(file=sys.stderr)
        rows = [[one.name, one.measured, one.limit, "kept" if one.kept else "BROKEN"] for one in self._promises]
        print_table(f"{self.name}, {time.monotonic() - self._began:.0f} s", ["promise", "measured", "limit", ""], rows)
        kept = bool(self._promises) and all(one.kept for one in self._promises)
        promises = [asdict(one) for one in self._promises]
        print_json(self.name, {"kept": kept, "promises": promises, **self.results})
        return 0 if kept else 1


def parser_of(doc: str | None, **defaults: tuple[Any, str]) -> argparse.ArgumentParser:
    """Return a suite's parser of its command line, with a flag for each of `defaults` and --seed, random by default.

    Each of `defaults` is the flag's default value, which also sets its type, and its help text.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="(drawn at random)")
    return parser


def run(name: str, body: Callable[[Trial], Awaitable[None]], *, limit_s: float) -> int:
    """Run a suite until it ends, SIGTERM comes or `limit_s` seconds are over; return its exit code.

    A suite that does not end TO_CLEAN_UP_S seconds after the limit is killed, and prints where it hangs.
    """
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
