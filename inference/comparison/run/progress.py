"""How far the comparison is: a bar on a terminal, a line per measurement elsewhere. On stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from inference.comparison.plan.grid import Sample


class Progress:
    """Shows phases and measurements.

    Args:
        console: of stderr.
        num_measurements: how many there will be; None: nobody knows.
    """

    def __init__(self, console: Console, num_measurements: int | None) -> None:
        self._console = console
        self._num_measurements = num_measurements
        self._num_measured = 0
        self._started = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=num_measurements)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, text: str) -> None:
        """Something that is not a measurement has begun."""
        self._bar.update(self._task, description=text)
        self._line(text)

    def measured(self, sample: Sample) -> None:
        self._num_measured += 1
        self._bar.update(self._task, advance=1, description=str(sample.cell))
        count = f"{self._num_measured}/{self._num_measurements or '?'}"
        self._line(f"{count} run {sample.repeat + 1}: {sample.cell}: {sample.tokens_per_s:.1f} tokens/s")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            elapsed_s = time.monotonic() - self._started
            print(f"{elapsed_s:6.1f} s  {text}", file=self._console.file, flush=True)
