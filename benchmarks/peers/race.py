"""Race of programs: all of their variants answer the same prompts in turn; each turn begins with another variant."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.peers.engine import OURS, Peer, Timed
from benchmarks.peers.environment import UnavailableError

PLAIN = "plain"


class Racer(Protocol):
    """Members of a program's process (`Engine`) that a race of programs uses."""

    peer: Peer
    variants: list[str]

    def generate(self, variant: str, prompts: Sequence[list[int]], num_tokens: int) -> Timed: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of a race, in which programs answer the same prompts in turn.

    Attributes:
        num_tokens: tokens of an answer.
        num_rounds: rounds over all prompts.
        num_streams: numbers of prompts at once; each is measured by itself.
        num_neighbours: number of other processes that keep cores busy in the middle third of the rounds.
    """

    num_tokens: int
    num_rounds: int
    num_streams: tuple[int, ...] = (1, 4, 16)
    num_neighbours: int = 0


@dataclass(slots=True)
class Row:
    """Result of one variant of a program, with one number of streams (prompts at once).

    Attributes:
        engine: name of the program.
        tokens_per_s: with one stream, a rate for each prompt, by the median time of the rounds; with several, a rate
            for each round, of all streams together.
        num_answers: number of all answers, of which the next two figures are parts.
        same_as_plain: number of answers equal to the program's own without a draft; None if these failed.
        same_as_ours: number of answers equal to those of this project without a draft, in the same dtype; None if these
            failed.
    """

    engine: str
    variant: str
    dtype: str
    num_streams: int
    tokens_per_s: list[float]
    num_answers: int
    same_as_plain: int | None = None
    same_as_ours: int | None = None


@dataclass(slots=True)
class Entry:
    """Times and answers of a variant in a race, by turn (a set of prompts), and why it failed ("" if it did not)."""

    engine: Racer
    variant: str
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[int, list[list[int]]] = field(default_factory=dict)
    failure: str = ""

    def run(self, turn: int, prompts: Sequence[list[int]], num_tokens: int) -> None:
        """Let the variant answer a turn's prompts at once, and store time and answers; after a failure, do nothing."""
        if self.failure:
            return
        try:
            timed = self.engine.generate(self.variant, prompts, num_tokens)
        except UnavailableError as error:
            self.failure = str(error)
            return
        self.seconds[turn].append(timed.seconds)
        self.answers[turn] = timed.token_ids

    @property
    def texts(self) -> list[list[int]]:
        return [answer for turn in sorted(self.answers) for answer in self.answers[turn]]


def race(
    engines: Sequence[Racer], prompts: Sequence[list[int]], plan: Plan, dtype: str, num_single: int
) -> tuple[list[Row], dict[str, str]]:
    """Measure all variants of the programs; return their rows, and, by variant, why others failed.

    There is a row for each variant and number of streams (prompts at once). For one stream the first `num_single`
    prompts are taken in turn; for N streams the first N at once.
    """
    rows, failures = [], {}
    for count in plan.num_streams:
        turns = [[prompt] for prompt in prompts[:num_single]] if count == 1 else [list(prompts[:count])]
        entries = _raced(engines, turns, count, plan)
        failures.update(
            {f"{_name(entry)} ({dtype}, {count} streams)": entry.failure for entry in entries if entry.failure}
        )
        rows += list(_rows([entry for entry in entries if not entry.failure], count, plan.num_tokens, dtype))
    return rows, failures


def _name(entry: Entry) -> str:
    return f"{entry.engine.peer.name}, {entry.variant}"


def _raced(engines: Sequence[Racer], turns: Sequence[list[list[int]]], count: int, plan: Plan) -> list[Entry]:
    able = [engine for engine in engines if engine.peer.most_streams >= count]
    entries = [Entry(engine, variant) for engine in able for variant in engine.variants]
    for entry in entries:  # a whole answer that does not count: programs prepare kernels, ours learns lengths
        entry.run(0, turns[0], plan.num_tokens)
        entry.seconds.clear()
    for number in range(plan.num_rounds):
        with _neighbours(plan.num_neighbours * (3 * number // plan.num_rounds == 1)):
            for turn, prompts in enumerate(turns):
                first = (number * len(turns) + turn) % len(entries)
                for entry in (*entries[first:], *entries[:first]):
                    entry.run(turn, prompts, plan.num_tokens)
    return entries


@contextmanager
def _neighbours(number: int) -> Iterator[None]:
    """Keep this number of cores busy with other processes during the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _rows(entries: Sequence[Entry], count: int, num_tokens: int, dtype: str) -> Iterator[Row]:
    plain = {entry.engine.peer.name: entry.texts for entry in entries if entry.variant == PLAIN}
    for entry in entries:
        name = entry.engine.peer.name
        rates = [num_tokens * count / statistics.median(seconds) for seconds in entry.seconds.values()]
        if count > 1:
            rates = [num_tokens * len(entry.texts) / seconds for seconds in entry.seconds[0]]
        same = [num_equal(entry.texts, plain.get(each)) for each in (name, OURS)]
        yield Row(name, entry.variant, dtype, count, [round(rate, 2) for rate in rates], len(entry.texts), *same)


def num_equal(texts: Sequence[list[int]], others: Sequence[list[int]] | None) -> int | None:
    """Return the number of answers that equal the answer in `others` at the same index; None if `others` is None."""
    return None if others is None else sum(one == other for one, other in zip(texts, others, strict=True))
