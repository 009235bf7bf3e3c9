"""Kill, freeze, cut, silence and slow down target, draft, pool worker and gateway at random tokens of answers.

An answer must equal the undisturbed target's; where nothing can resume it, it may be a beginning and one clear error. A
run is determined by --seed and its number: `--seed S --run N` repeats one.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import httpx

from tests.suites.chaos.cases import CASES, Recipe, recipe, strike
from tests.support.clients import Answer, Progress, Question, ask, ask_http, expected_answers, questions
from tests.support.cluster import Cluster, cluster
from tests.support.trial import Trial, parser_of, run

NUM_TOKENS = 200
NUM_QUESTIONS = 6
CLEAR = ("UNAVAILABLE", "DISCONNECTED")
"""Statuses that may end an answer that no server could continue after the fault."""
RUN_LIMIT_S = 120.0
AFTER_FAULT_S = 25.0
"""Most seconds from a fault's end until the answer goes on or ends; three times as long as on a usual machine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run: how a client's answer came through one fault.

    Attributes:
        verdict: "same" if the answer is right; "part" if it is a right beginning and one clear error; else words about
            what is wrong.
        pause_s: most seconds without a token, from the fault's begin to the answer's end.
        lasted_s: seconds that the fault lasted, the restart of a killed server included.
    """

    recipe: Recipe
    verdict: str
    pause_s: float
    lasted_s: float

    @property
    def is_kept(self) -> bool:
        return self.verdict == "same" or (self.verdict == "part" and not self.recipe.case.resumes)


async def perform(where: Cluster, one: Recipe, question: Question, expected: Answer) -> Outcome:
    """Ask a question, cause the fault during its answer, and wait until all servers are up again; return the result."""
    struck: list[asyncio.Task[float]] = []
    began = 0.0

    def on_progress(num_tokens: int) -> None:
        nonlocal began
        if num_tokens >= one.strike_at and not struck:
            began = time.monotonic()
            struck.append(asyncio.create_task(strike(where, one)))

    try:
        async with asyncio.timeout(RUN_LIMIT_S):
            answer = await _asked(where, one, question, on_progress)
            ended = time.monotonic()
            lasted_s = await struck[0] if struck else 0.0
    except TimeoutError:
        return Outcome(one, f"hung for {RUN_LIMIT_S:.0f} s", RUN_LIMIT_S, 0.0)
    moments = [began, *(moment for moment in answer.arrivals if moment > began), ended]
    pause_s = max(later - earlier for earlier, later in itertools.pairwise(moments))
    verdict = _judged(answer, expected)
    if not struck:
        verdict = f"the fault never came: {verdict}"
    elif pause_s > lasted_s + AFTER_FAULT_S:
        verdict = f"a pause of {pause_s:.0f} s: {verdict}"
    if not await where.settled():
        verdict = f"slots or servers did not come back: {verdict}"
    return Outcome(one, verdict, pause_s, lasted_s)


async def _asked(where: Cluster, one: Recipe, question: Question, on_progress: Progress) -> Answer:
    if one.case.entry == "gateway":
        async with httpx.AsyncClient(base_url=where["gateway"].url, timeout=RUN_LIMIT_S) as client:
            return await ask_http(client, question, on_progress)
    address = where.links["client"].address if one.case.entry == "target" else where["draft"].address
    return await ask(address, question, on_progress)


def _judged(answer: Answer, expected: Answer) -> str:
    if answer.same_as(expected):
        return "same"
    if not answer.begins(expected):
        return f"OTHER TOKENS, {answer.fault}"
    return "part" if answer.fault in CLEAR else f"part, {answer.fault}"


async def chaos(trial: Trial, *, runs: range, seed: int) -> None:
    names = ("target", "draft", "worker", "gateway")
    trial.note(f"seed {seed}: `python -m tests.suites.chaos --seed {seed} --run N` repeats run N")
    trial.say("starting")
    outcomes: list[Outcome] = []
    async with cluster(names, linked=True) as where:
        expected = await expected_answers(where["target"].address, questions(NUM_QUESTIONS, [NUM_TOKENS]))
        asked = list(expected)
        for number in runs:
            one = recipe(seed, number, NUM_QUESTIONS, NUM_TOKENS)
            trial.say(f"run {number}, {len(outcomes)} of {len(runs)}: {one}")
            question = asked[one.question]
            outcomes.append(await perform(where, one, question, expected[question]))
            if not outcomes[-1].is_kept:
                trial.note(f"run {number} BROKEN, {outcomes[-1].verdict}: {one}")
            if not all(member.is_alive for member in where.members.values()):
                trial.note("a server is gone: no further runs")
                break
        tracebacks = where.tracebacks()
    _report(trial, outcomes, num_runs=len(runs))
    trial.promise("no unexpected error in a log", len(tracebacks), 0, kept=not tracebacks)
    trial.results |= {"seed": seed, "tracebacks": tracebacks[:5]}


def _report(trial: Trial, outcomes: list[Outcome], *, num_runs: int) -> None:
    by_case: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_case[str(outcome.recipe.case)].append(outcome)
    cases = {}
    for case in sorted(by_case):
        found = by_case[case]
        same = sum(outcome.verdict == "same" for outcome in found)
        kept = all(outcome.is_kept for outcome in found)
        pauses = sorted(outcome.pause_s for outcome in found)
        wanted = "all the same" if found[0].recipe.case.resumes else "the same, or a part and one error"
        figures = f"{same} of {len(found)} the same; pause {statistics.median(pauses):.1f}, worst {pauses[-1]:.1f} s"
        trial.promise(case, figures, wanted, kept=kept)
        cases[case] = {"runs": len(found), "same": same, "pauses_s": [round(pause, 2) for pause in pauses]}
    trial.promise("runs made", len(outcomes), num_runs, kept=len(outcomes) == num_runs)
    beyond = sorted(outcome.pause_s - outcome.lasted_s for outcome in outcomes)
    figures = f"median {statistics.median(beyond):.1f}, worst {beyond[-1]:.1f} s"
    trial.promise(
        "pause beyond the fault's own time", figures, f"{AFTER_FAULT_S:.0f} s", kept=beyond[-1] <= AFTER_FAULT_S
    )
    broken = [f"{outcome.recipe}: {outcome.verdict}" for outcome in outcomes if not outcome.is_kept]
    trial.results |= {"runs": len(outcomes), "cases": cases, "broken": broken}


def main() -> int:
    parser = parser_of(__doc__, runs=(200, f"{len(CASES)} kinds of fault take turns"))
    parser.add_argument("--run", type=int, metavar="N", help="only this one of the seed's runs")
    args = parser.parse_args()
    runs = range(args.runs) if args.run is None else range(args.run, args.run + 1)
    return run("chaos", partial(chaos, runs=runs, seed=args.seed), limit_s=480 + 20 * len(runs))


if __name__ == "__main__":
    raise SystemExit(main())
