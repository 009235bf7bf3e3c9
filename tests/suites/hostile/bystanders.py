"""Ordinary clients of servers under attack, which must see nothing but a delay."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.clients import FULL, Answer, Ask, Question

PAUSE_S = 0.5
"""Pause in seconds between two answers of a client, so short that of five clients one is always in an answer."""


@dataclass
class Client:
    """Client that asks one server again and again, and compares the answers.

    Attributes:
        num_refused: answers with the status for a full queue, which is no fault.
        faults: number of answers that were wrong or broke, by kind.
    """

    name: str
    ask: Ask
    num_answers: int = 0
    num_refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0

    async def run(self, expected: Mapping[Question, Answer]) -> None:
        """Ask all questions one after another, again and again, until cancelled; compare the answers."""
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
