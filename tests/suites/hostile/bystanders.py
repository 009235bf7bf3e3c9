"""Ordinary clients of servers under attack in the hostile suite; they must notice nothing but a delay."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.clients import FULL, Answer, Ask, Question

PAUSE_S = 0.5
"""Seconds between two answers of a client; so few that at any time one of five clients is waiting for an answer."""


@dataclass
class Client:
    """Client that asks one server again and again, and compares the answers with the expected ones.

    Attributes:
        num_refused: number of requests that were refused since the queue was full, which is no fault.
        faults: number of answers that were wrong or incomplete, by kind of fault.
        longest_gap_s: most seconds between two messages of one answer.
    """

    name: str
    ask: Ask
    num_answers: int = 0
    num_refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0

    async def run(self, expected: Mapping[Question, Answer]) -> None:
        """Ask all questions in turn, again and again, until this task is cancelled; count right and wrong answers."""
        while True:
            for question, answer in expected.items():
                self._judge(await self.ask(question), answer)
                await asyncio.sleep(PAUSE_S)

    def _judge(self, answer: Answer, expected: Answer) -> None:
        self.longest_gap_s = max(self.longest_gap_s, answer.longest_gap_s)
        if answer.same_as(expected):
            self.num_answers += 1
        elif answer.fault in FULL and not answer.arrivals:
            self.num_refused += 1
        else:
            self.faults["other tokens" if answer.fault is None else str(answer.fault)] += 1
