"""How far a run is, on stderr: a bar on a terminal, a line per prompt otherwise."""

from __future__ import annotations

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inference.cli.prompts.results import Result

logger = logging.getLogger(__name__)


class PromptProgress:
    """Counts prompts that are done and tokens that have come."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self._num_done = 0
        self._num_tokens = 0
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=console)
            self._task = self._bar.add_task("0 tokens", total=num_prompts)

    def __enter__(self) -> PromptProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def came(self, num_tokens: int) -> None:
        """Count tokens."""
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._num_tokens} tokens")

    def done(self, result: Result) -> None:
        """Count a prompt."""
        self._num_done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
            return
        outcome = f"failed: {result.error}" if result.error else f"{result.stats.num_output_tokens} tokens"
        logger.info("prompt %d of %d: %s", self._num_done, self._num_prompts, outcome)
