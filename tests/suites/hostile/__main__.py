"""Attack servers by every known recipe and by fuzz; other clients meanwhile must notice no more than a delay.

Clients of target, draft, fused server and gateway must get exactly the tokens of an undisturbed target. A health check
may take the larger of --bound_ms and --factor times the longest check before the attacks. A server's memory may grow to
1.5 times its size with all slots in use.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from tests.suites.hostile.bystanders import Client
from tests.suites.hostile.scene import Scene
from tests.support.clients import expected_answers, questions
from tests.support.cluster import Cluster, cluster
from tests.support.trial import Trial, parser_of, run
from tests.support.vitals import reset_peak

NUM_TOKENS = 150
NUM_QUESTIONS = 6
MEMORY_FACTOR = 1.5
MAX_CALM_S = 60.0
SERVERS = ("target", "draft", "worker", "gateway", "fused")
BAD = ("UNKNOWN", "INTERNAL", "500")
"""Statuses that no request may end with, not even a wrong one."""


Lines = AsyncGenerator[dict[str, Any], None]
Checks = dict[str, dict[str, float]]
"""Seconds of the longest health check, by the attack that ran at the time, then by server."""


class Watch:
    """Longest health checks, which the process `probe.py` measures, by the attack that ran at the time.

    Attributes:
        phase: name of the attack that runs now; "calm" before the first one.
        worst: seconds of the longest check so far, by attack, then by server.
        num_failed: number of checks that failed.
    """

    def __init__(self) -> None:
        self.phase = "calm"
        self.worst: Checks = defaultdict(dict)
        self.num_failed = 0

    async def listen(self, prober: Lines) -> None:
        """Record the measurements that `probe.py` prints, until this task is cancelled."""
        async for news in prober:
            self.num_failed = news["failed"]
            seen = self.worst[self.phase]
            for name, took in news["worst"].items():
                seen[name] = max(seen.get(name, 0.0), took)


def longest(checks: Checks, *, calm: bool) -> tuple[float, str]:
    """Return the seconds of the longest health check, and the attack that ran at the time.

    With `calm` only the checks before the first attack count, else only those after it.
    """
    chosen = [(took, phase) for phase, seen in checks.items() for took in seen.values() if (phase == "calm") is calm]
    return max(chosen, default=(0.0, "nothing"))


async def lines_of(process: asyncio.subprocess.Process) -> Lines:
    """Yield the JSON objects that a process prints, one per line, until it ends.

    Raises:
        RuntimeError: the process ended with an error.
    """
    assert process.stdout is not None
    async for line in process.stdout:
        yield json.loads(line)
    if code := await process.wait():
        raise RuntimeError(f"a process of this suite ended with code {code}")


@asynccontextmanager
async def started(module: str, *arguments: object) -> AsyncGenerator[Lines, None]:
    """Run a module of this suite as a process until the block is left; yield an iterator of the JSON that it prints.

    The module gets each of `arguments` as a word of JSON.
    """
    words = (json.dumps(argument) for argument in arguments)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tests.suites.hostile.{module}", *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield lines_of(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def bystanders(where: Cluster) -> AsyncGenerator[tuple[list[Client], Watch], None]:
    """Run ordinary clients, and the process that times health checks, until the block is left.

    Yield the clients, which count their answers, and the record of the checks' times.
    """
    expected = await expected_answers(where["target"].address, questions(NUM_QUESTIONS, [NUM_TOKENS]))
    servers = {name: where[name].address for name in ("target", "draft", "fused")}
    pages = {f"{name} over HTTP": where[name].url for name in ("gateway", "fused")}
    probed = {name: (address, where[name.split()[0]].pid) for name, address in (servers | pages).items()}
    watch = Watch()
    async with AsyncExitStack() as stack:
        clients = [Client(name, ask) for name, ask in (await where.ways(stack)).items()]
        prober = await stack.enter_async_context(started("probe", probed))
        work = [watch.listen(prober), *(client.run(expected) for client in clients)]
        tasks = [asyncio.create_task(one) for one in work]
        try:
            yield clients, watch
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
    if failed:
        raise RuntimeError(f"a bystander ended: {failed}")


async def attacked(trial: Trial, scene: Scene, watch: Watch, seconds: float) -> dict[str, Any]:
    """Run the attackers' process for `seconds`; return how often each of their calls ended with each status."""
    seen: dict[str, Any] = {}
    async with started("attack", asdict(scene), seconds) as attackers:
        async for news in attackers:
            seen = news.get("seen", seen)
            watch.phase = news.get("recipe", watch.phase)
            trial.say(f"{watch.phase} {news.get('messages', '')}")
    return seen


async def hostile(trial: Trial, *, seconds: float, bound_s: float, factor: float, seed: int) -> None:
    trial.note(f"seed {seed}")
    trial.say("starting")
    async with cluster(SERVERS) as where:
        scene = await _scene(where, seed)
        base = await where.touch()
        calm_s = min(MAX_CALM_S, seconds / 5)
        async with bystanders(where) as (clients, watch):
            trial.say(f"{calm_s:.0f} s of calm")
            await asyncio.sleep(calm_s)
            for member in where.members.values():
                reset_peak(member.pid)
            seen = await attacked(trial, scene, watch, seconds - calm_s)
        peaks = {name: member.vitals.peak_mib if member.is_alive else 0.0 for name, member in where.members.items()}
        is_settled, tracebacks = await where.settled(), where.tracebacks()
    _judge_clients(trial, clients)
    _judge_latency(trial, watch, bound_s, factor)
    for name, peak in peaks.items():
        limit = base[name] * MEMORY_FACTOR
        trial.promise(f"peak memory of {name}", f"{peak:.0f} MiB", f"{limit:.0f} MiB", kept=0 < peak <= limit)
    trial.promise("slots free, servers ready at the end", is_settled, True, kept=is_settled)
    bad = sum(count for status, count in seen.items() if status.split(" ")[-1] in BAD)
    trial.promise("nonsense answered as our own fault", bad, 0, kept=bad == 0)
    trial.promise("no unexpected error in a log", len(tracebacks), 0, kept=not tracebacks)
    trial.promise("messages of fuzz", seen.get("messages", 0), "> 0", kept=seen.get("messages", 0) > 0)
    trial.results |= {"seed": seed, "seen": seen, "memory_touched_mib": base, "tracebacks": tracebacks[:5]}


async def _scene(where: Cluster, seed: int) -> Scene:
    card = await where.card()
    return Scene(
        target=where["target"].address,
        draft=where["draft"].address,
        fused=where["fused"].address,
        gateway_port=where["gateway"].http_port,
        fused_port=where["fused"].http_port,
        fingerprint=card.tokenizer_fingerprint,
        vocab_size=card.vocab_size,
        seed=seed,
    )


def _judge_clients(trial: Trial, clients: list[Client]) -> None:
    for client in clients:
        figures = f"{client.num_answers} the same, {client.num_refused} refused"
        figures += f", longest gap {client.longest_gap_s:.2f} s"
        if client.faults:
            figures += f", {dict(client.faults)}"
        kept = client.num_answers > 0 and not client.faults
        trial.promise(f"answers of {client.name}", figures, "the same, or refused", kept=kept)


def _judge_latency(trial: Trial, watch: Watch, bound_s: float, factor: float) -> None:
    calm, _ = longest(watch.worst, calm=True)
    worst, phase = longest(watch.worst, calm=False)
    limit = max(bound_s, factor * calm)
    figures = f"{worst * 1e3:.0f} ms ({phase}), calm {calm * 1e3:.0f} ms"
    trial.promise("worst health check", figures, f"{limit * 1e3:.0f} ms", kept=worst <= limit)
    trial.promise("health checks that failed", watch.num_failed, 0, kept=watch.num_failed == 0)
    trial.results["worst_health_s"] = watch.worst


def main() -> int:
    args = parser_of(
        __doc__,
        seconds=(180.0, "calm and attack together"),
        bound_ms=(100.0, "of a health check"),
        factor=(3.0, "of the calm's worst, if that is more"),
    ).parse_args()
    body = partial(hostile, seconds=args.seconds, bound_s=args.bound_ms / 1e3, factor=args.factor, seed=args.seed)
    return run("hostile", body, limit_s=480 + 3 * args.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
