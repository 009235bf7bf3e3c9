"""Progress of the comparison on stderr: a bar on a terminal, a line per measurement elsewhere."""

from __future__ import annotations

from rich import progress
from rich.console import Console

from specdec.comparison.plan.grid import Sample


class Progress(progress.Progress):
    """Display of phases and measurements.

    Args:
        console: console of stderr.
        num_measurements: total number of measurements; None if it is unknown.
    """

    def __init__(self, console: Console, num_measurements: int | None) -> None:
        columns = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        texts = "{task.description}", progress.BarColumn()
        super().__init__(*texts, *columns, console=console, disable=not console.is_terminal, transient=True)
        self.add_task("starting", total=num_measurements)
        (self._work,) = self.tasks

    def phase(self, text: str) -> None:
        """Show that a phase without measurements has begun."""
        self.update(self._work.id, description=text)
        self._line(text)

    def note(self, text: str) -> None:
        """Print a line that stays visible, unlike the progress bar."""
        if self.console.is_terminal:
            self.console.print(text, highlight=False, markup=False)
        self._line(text)

    def measured(self, sample: Sample) -> None:
        self.update(self._work.id, advance=1, description=str(sample.cell))
        count = f"{self._work.completed:g}/{self._work.total or '?'}"
        self._line(f"{count} run {sample.repeat + 1}: {sample.cell}: {sample.tokens_per_s:.1f} tokens/s")

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            print(f"{self._work.elapsed or 0.0:6.1f} s  {text}", file=self.console.file, flush=True)
