"""Thousands of short sessions on every topology, with cancels and deadlines, leave nothing in the servers.

Slots, tasks of the event loop, descriptors, threads and memory of every server return to their values after the
warm-up, which is 10 % of the sessions and fills every slot once. Whole answers are compared with the target's.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import grpc

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from tests.support.clients import FULL, Answer, Ask, Progress, Question, expected_answers, questions
from tests.support.cluster import Cluster, Member, cluster
from tests.support.raw_worker import after, attach, proposing
from tests.support.trial import Trial, parser_of, run

SERVERS = ("target", "draft", "worker", "gateway", "fused")
PARALLEL = 8
NUM_TOKENS = (1, 3, 8, 24)
SESSION_LIMIT_S = 60.0
BY_HAND_S = 2.0
"""Time limit in seconds of a request with random draft tokens; its target may wait that long for valid ones."""
LATE = ("DEADLINE_EXCEEDED", "HTTP 504", "HTTP 408", "TIMEOUT")
MORE_FDS, MORE_THREADS, MORE_TASKS = 4, 2, 4
MORE_MEMORY, MORE_MIB = 0.1, 40.0
"""Growth of a server's memory that is allowed to the allocator, as a share of its size in full use, and in MiB."""


class Enough(Exception):
    """Raised by a client's callback to leave before the end of an answer."""


@dataclass
class Tally:
    """Outcomes of all requests so far.

    Attributes:
        ends: number of requests by server and outcome.
        wrong: a description of each wrong answer and each unexpected error.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Left:
    """What an idle server occupies: requests, tasks of its event loop, file descriptors, threads, and memory in MiB.

    `rss_mib` is all resident memory, `own_mib` that without pages of files.
    """

    num_requests: int
    num_tasks: int
    num_fds: int
    num_threads: int
    rss_mib: float
    own_mib: float


class Visitor:
    """Client of all servers, which sends one request after another over the same connections; several run at once."""

    def __init__(
        self, where: Cluster, expected: dict[Question, Answer], tally: Tally, card: pb.GetModelResponse
    ) -> None:
        self._where = where
        self._expected = expected
        self._tally = tally
        self._card = card

    async def visit(self, numbers: Iterator[int], seed: int) -> None:
        """Send a request for each of `numbers` that this client gets; with `seed` the number determines the request."""
        async with AsyncExitStack() as stack:
            ways = await self._where.ways(stack)
            target = await stack.enter_async_context(open_channel(self._where["target"].address))
            for number in numbers:
                draw = random.Random(f"{seed} {number}")
                try:
                    async with asyncio.timeout(SESSION_LIMIT_S):
                        await self._session(draw, ways, target)
                except TimeoutError:
                    self._tally.wrong.append(f"session {number} hung")

    async def _session(self, draw: random.Random, ways: dict[str, Ask], target: grpc.aio.Channel) -> None:
        if draw.random() < 0.2:
            await self._draft(draw, target)
            return
        name, question = draw.choice(list(ways)), draw.choice(list(self._expected))
        end = draw.choice(("whole", "whole", "left", "late"))
        deadline_s = draw.uniform(0.002, 0.2) if end == "late" else SESSION_LIMIT_S
        on_progress = _leaving(draw.randrange(question.num_tokens)) if end == "left" else None
        try:
            answer = await ways[name](question, on_progress, deadline_s=deadline_s)
        except Enough:
            self._tally.ends[f"{name}: left"] += 1
            return
        self._judge(name, end, answer, self._expected[question])

    def _judge(self, name: str, end: str, answer: Answer, expected: Answer) -> None:
        if answer.same_as(expected):
            self._tally.ends[f"{name}: whole"] += 1
        elif answer.fault in FULL or (end == "late" and answer.fault in LATE and answer.begins(expected)):
            self._tally.ends[f"{name}: {answer.fault}"] += 1
        else:
            self._tally.wrong.append(f"{name}, {end}: {answer.fault} ({answer.words}), {answer.text!r}")

    async def _draft(self, draw: random.Random, target: grpc.aio.Channel) -> None:
        """Send a request with a draft worker that proposes random tokens; either call may be cancelled at any time."""
        name, timeout_s = draw.randbytes(16), draw.choice((0.05, BY_HAND_S))
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6, 7]),
            max_new_tokens=draw.randrange(1, 20),
            schedule=draw.choice((pb.SCHEDULE_SYNC, pb.SCHEDULE_ASYNC)),
            draft_session=name,
        )
        call = rpc.VerificationServiceStub(target).Assist(timeout=timeout_s)
        answer = rpc.GenerationServiceStub(target).Generate(request, timeout=timeout_s)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(attach(self._card, num_slots=1, is_private=True))
            for _ in range(draw.randrange(24)):
                branch = after(draw.randrange(4), draw.randrange(500))
                await call.write(proposing(name.hex(), *([branch] if draw.random() < 0.5 else [])))
                if await answer.read() == grpc.aio.EOF:
                    break
        call.cancel()
        answer.cancel()
        self._tally.ends["by hand: left"] += 1


def _leaving(after: int) -> Progress:
    def on_progress(num_tokens: int) -> None:
        if num_tokens > after:
            raise Enough

    return on_progress


async def drive(trial: Trial, where: Cluster, visitors: list[Visitor], numbers: range, seed: int) -> None:
    """Send the requests with these numbers, PARALLEL of them at a time."""
    left = iter(numbers)
    counted = (_said(trial, number, numbers) for number in left)
    await asyncio.gather(*(visitor.visit(counted, seed) for visitor in visitors))


def _said(trial: Trial, number: int, numbers: range) -> int:
    if number % 20 == 0:
        trial.say(f"session {number} of {numbers.stop}")
    return number


async def left_in(member: Member) -> Left:
    """Return what an idle server occupies now: requests, tasks, file descriptors, threads and memory."""
    num_tasks, one = int((await member.gauges())["specdec_event_loop_tasks"]), member.vitals
    return Left(await member.num_requests(), num_tasks, one.num_fds, one.num_threads, one.rss_mib, one.own_mib)


async def soak(trial: Trial, *, sessions: int, seed: int) -> None:
    trial.note(f"seed {seed}")
    trial.say("starting")
    tally = Tally()
    async with cluster(SERVERS) as where:
        expected = await expected_answers(where["target"].address, questions(12, NUM_TOKENS))
        card, full = await where.card(), await where.touch()
        visitors = [Visitor(where, expected, tally, card) for _ in range(PARALLEL)]
        num_warm = max(40, sessions // 10)
        before = await _after(trial, where, visitors, range(num_warm), seed)
        after = await _after(trial, where, visitors, range(num_warm, num_warm + sessions), seed)
        tracebacks = where.tracebacks()
    _judge(trial, before, after, full)
    num_ends = sum(tally.ends.values())
    trial.promise("sessions that ended as they should", num_ends, sessions + num_warm, kept=not tally.wrong)
    num_whole = sum(count for end, count in tally.ends.items() if end.endswith("whole"))
    trial.promise("answers compared with the target's", num_whole, "> 0", kept=num_whole > 0)
    trial.promise("no unexpected error in a log", len(tracebacks), 0, kept=not tracebacks)
    trial.results |= {"seed": seed, "sessions": sessions, "ends": dict(sorted(tally.ends.items()))}
    trial.results |= {"wrong": tally.wrong[:20], "tracebacks": tracebacks[:5]}


async def _after(trial: Trial, where: Cluster, visitors: list[Visitor], numbers: range, seed: int) -> dict[str, Left]:
    """Send the requests with these numbers; return what each server occupies once it is idle again."""
    await drive(trial, where, visitors, numbers, seed)
    trial.promise(f"slots free after session {numbers.stop}", is_free := await where.settled(), True, kept=is_free)
    await asyncio.sleep(2)  # connections that have been closed are noticed
    return {name: await left_in(member) for name, member in where.members.items()}


def _judge(trial: Trial, before: dict[str, Left], after: dict[str, Left], full: dict[str, float]) -> None:
    limits = {"num_requests": 0, "num_tasks": MORE_TASKS, "num_fds": MORE_FDS, "num_threads": MORE_THREADS}
    for name, was in before.items():
        now = after[name]
        for what, more in limits.items():
            then, since = getattr(was, what), getattr(now, what)
            title = what.removeprefix("num_")
            trial.promise(f"{title} of {name}", f"{then} -> {since}", f"+{more}", kept=since <= then + more)
        limit = max(was.rss_mib, full[name]) * (1 + MORE_MEMORY) + MORE_MIB
        figures = f"{was.rss_mib:.0f} -> {now.rss_mib:.0f} MiB, {was.own_mib:.0f} -> {now.own_mib:.0f} without files"
        trial.promise(f"memory of {name}", figures, f"{limit:.0f} MiB", kept=now.rss_mib <= limit)


def main() -> int:
    args = parser_of(__doc__, sessions=(10_000, "after the warm-up")).parse_args()
    body = partial(soak, sessions=args.sessions, seed=args.seed)
    return run("soak", body, limit_s=480 + 0.5 * args.sessions)


if __name__ == "__main__":
    raise SystemExit(main())
