"""The faults of the chaos suite, each with the server that it hits and the server that the client asks."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass

from specdec.comparison.run.proxy import LinkConditions
from tests.support.cluster import Cluster

LINK_FAULTS = ("cut", "hole", "throttle")
BYTES_PER_S = 10_000.0
LONG_HOLE_S = 20.0
"""Seconds that some silenced connections last: longer than a connection waits for the answer to a ping (15 s)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of fault, the server that it hits, and the server that the client asks meanwhile.

    Attributes:
        entry: name of the server that the client asks.
        victim: name of the server that is killed or frozen, or whose connection is cut, silenced or slowed down.
        fault: kill, freeze, cut, hole (the connection falls silent) or throttle (it is slowed down).
        resumes: True if the answer must be whole; False if it may also be a beginning, ended by one error.
    """

    entry: str
    victim: str
    fault: str
    resumes: bool

    def __str__(self) -> str:
        return f"{self.entry}: {self.fault} {self.victim}"


def _matrix() -> tuple[Case, ...]:
    cases = [Case("target", "target", "kill", False), Case("target", "target", "freeze", True)]
    cases += [Case("target", "client", fault, fault == "throttle") for fault in LINK_FAULTS]
    cases += [Case("target", "worker", fault, True) for fault in ("kill", "freeze", *LINK_FAULTS)]
    for entry in ("draft", "gateway"):
        cases += [Case(entry, "target", "kill", True), Case(entry, "target", "freeze", True)]
        cases += [Case(entry, "draft", "kill", False), Case(entry, "draft", "freeze", True)]
    cases += [Case("draft", "draft", fault, True) for fault in LINK_FAULTS]
    cases += [Case("gateway", "gateway", "kill", False), Case("gateway", "gateway", "freeze", True)]
    cases += [Case("gateway", "gateway", fault, fault == "throttle") for fault in LINK_FAULTS]
    return tuple(cases)


CASES = _matrix()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one run does: the fault, the question's number, the token at which the fault begins, and its seconds."""

    case: Case
    question: int
    strike_at: int
    hold_s: float

    def __str__(self) -> str:
        return f"{self.case} at token {self.strike_at} of question {self.question}, for {self.hold_s:.1f} s"


def recipe(seed: int, index: int, num_questions: int, num_tokens: int) -> Recipe:
    """Return what run number `index` of a seed does.

    Every `len(CASES)` consecutive runs have each kind of fault once, in random order.
    """
    turn, place = divmod(index, len(CASES))
    case = random.Random(f"{seed} {turn}").sample(CASES, len(CASES))[place]
    draw = random.Random(f"{seed} {index}")
    is_long = case.fault == "hole" and draw.random() < 0.1
    hold_s = LONG_HOLE_S if is_long else draw.uniform(0.2, 3.0)
    return Recipe(case, draw.randrange(num_questions), draw.randrange(1, num_tokens - 10), hold_s)


async def strike(cluster: Cluster, recipe: Recipe) -> float:
    """Cause a run's fault, and undo it after `hold_s` seconds, or at once after a kill; return the seconds it took."""
    case, began = recipe.case, asyncio.get_running_loop().time()
    if case.fault == "kill":
        cluster[case.victim].send(signal.SIGKILL)
        await cluster[case.victim].restart()
    elif case.fault == "freeze":
        cluster[case.victim].send(signal.SIGSTOP)
        await asyncio.sleep(recipe.hold_s)
        cluster[case.victim].send(signal.SIGCONT)
    else:
        await _disturb(cluster, recipe)
    return asyncio.get_running_loop().time() - began


async def _disturb(cluster: Cluster, recipe: Recipe) -> None:
    link = cluster.links[recipe.case.victim]
    if recipe.case.fault == "throttle":
        link.conditions = LinkConditions(bytes_per_s=BYTES_PER_S)
    elif recipe.case.fault == "cut":
        link.cut()
    else:
        link.blackhole()
    await asyncio.sleep(recipe.hold_s)
    link.conditions = LinkConditions()
    link.restore()
