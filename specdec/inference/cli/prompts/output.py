"""Output of results, for people and for programs. Text and JSON go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specdec.inference.commit import Delta
from specdec.inference.request import SamplingParams
from specdec.inference.workers.completing.results import Result

logger = logging.getLogger(__name__)

GREEN, PLAIN = "\x1b[32m", "\x1b[39m"


class Sink(Protocol):
    """Interface of an output, which gets results one after another: `begin`, any number of `show`, `end`."""

    def begin(self, result: Result) -> None: ...

    def show(self, result: Result, delta: Delta) -> None: ...

    def end(self, result: Result) -> None: ...


class TextSink:
    """Output as text: for each result the prompt, its continuation as it comes, and a line of figures.

    On a terminal, accepted draft tokens are green.

    Args:
        sampling: parameters of all requests; unless they are greedy, the figures name each request's seed.
    """

    _num_ended = 0

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def begin(self, result: Result) -> None:
        print(f"\n>>> {result.prompt}", flush=True)
        sys.stdout.write(result.prompt)

    def show(self, result: Result, delta: Delta) -> None:
        sys.stdout.write(coloured(delta))
        sys.stdout.flush()

    def end(self, result: Result) -> None:
        self._num_ended += 1
        if result.error is not None:
            print(flush=True)  # ends the line that has begun
            print(f"--- failed: {result.prompt!r}: {result.error}", file=sys.stderr, flush=True)
            return
        stats = result.stats
        parts = [
            f"{stats.num_output_tokens} tokens in {stats.end_to_end_s:.2f} s",
            f"{stats.tokens_per_s:.1f} tokens/s",
        ]
        if stats.acceptance_rate is not None:
            looked_up = {source for source, _ in stats.by_source} == {"lookup"}
            parts.append(f"acceptance {stats.acceptance_rate:.2f}{' of what was looked up' if looked_up else ''}")
        parts.append(f"finish {result.finish_reason.value if result.finish_reason else '?'}")
        if not self._sampling.greedy:
            parts.append(f"seed {result.seed}")
        print(f"\n--- {self._num_ended}: {', '.join(parts)}", flush=True)


class TokenSink(TextSink):
    """Output with a line per token (number, id, text, and whether it was a draft token), then the text as a whole."""

    def begin(self, result: Result) -> None:
        print(f"\n>>> {result.prompt}", flush=True)

    def show(self, result: Result, delta: Delta) -> None:
        first = len(result.token_ids) - len(delta.token_ids)
        parts = [*delta.marked(), *[("", False)] * len(delta.token_ids)]  # a server may send no lengths of pieces
        for index, (token_id, (piece, drafted)) in enumerate(zip(delta.token_ids, parts, strict=False), first):
            print(f"{index:5d} {token_id:7d}  {'draft ' if drafted else 'target'}  {piece!r}", flush=True)

    def end(self, result: Result) -> None:
        print(result.prompt + result.text, end="")
        super().end(result)


def coloured(delta: Delta) -> str:
    """Return a part of an answer for stdout: accepted draft tokens are green on a terminal, unless NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return delta.text
    return "".join(f"{GREEN}{piece}{PLAIN}" if drafted and piece else piece for piece, drafted in delta.marked())


class JsonSink:
    """Output as JSON: on stdout one line with one object per prompt, and nothing else.

    Progress goes to stderr: a bar on a terminal, a line per prompt otherwise.
    """

    def __init__(self, num_prompts: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self.bar.add_task("0 tokens", total=num_prompts)
        (self._task,) = self.bar.tasks
        self._num_tokens = 0

    def begin(self, result: Result) -> None:
        pass

    def show(self, result: Result, delta: Delta) -> None:
        self._num_tokens += len(delta.token_ids)
        self.bar.update(self._task.id, description=f"{self._num_tokens} tokens")

    def end(self, result: Result) -> None:
        print(json.dumps(result.to_json(), ensure_ascii=False), flush=True)
        self.bar.advance(self._task.id)
        if self.bar.disable:
            outcome = f"failed: {result.error}" if result.error else f"{result.stats.num_output_tokens} tokens"
            logger.info("prompt %d of %d: %s", self._task.completed, self._task.total, outcome)


def print_summary(results: Sequence[Result]) -> None:
    """Print a table of figures per prompt to stderr, which fits into 80 columns."""
    table = Table(title="profile", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("prompt", no_wrap=True, max_width=13)
    for name in ("tokens", "tok/s", "TTFT ms", "TPOT ms", "accepted", "tok/pass", "B/tok"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_summary_row(result))
    Console(stderr=True).print(table)


def _summary_row(result: Result) -> list[str]:
    stats = result.stats
    return [
        escape(result.prompt),
        str(stats.num_output_tokens),
        f"{stats.tokens_per_s:.1f}",
        f"{stats.ttft_s * 1e3:.1f}",
        _figure(stats.tpot_s, scale=1e3, digits=2),
        _figure(stats.acceptance_rate, digits=3),
        _figure(stats.mean_acceptance_length, digits=2),
        f"{stats.wire_bytes / max(1, stats.num_output_tokens):.1f}",
    ]


def _figure(value: float | None, *, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
