"""Longest pause of a client's stream when its draft fails, in passes of the target.

    python -m benchmarks.pool_faults [--repeats 5] [--rtt_ms 2]

A target and one worker of the pool run on a core each with a delay between them, and a client streams one answer at a
time. In mid-stream the worker is killed, or its link goes silent (nothing is delivered, nothing is reset), or nothing
happens; the three take turns. The pause is the longest gap between two messages from then on; a pass is the median one
of width 1. The answers must be those of the target alone. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.report import print_json, print_table
from comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy, precise_event_loop
from grpc_comm.channel import open_channel
from inference.commit import Delta
from inference.serving.processes import ServerProcess, free_port, server_process
from inference.workers.completing.remote import RemoteCompleter
from inference.workers.completion import CompletionRequest

PROMPT = "It was the best of times, it was the worst of times,"
NUM_TOKENS = 160
FAULT_AT = 60
"""Number of output tokens after which the draft fails."""
LIMIT_PASSES = 3.0

Fault = Callable[[ServerProcess, DelayProxy], None]


def kill(worker: ServerProcess, _: DelayProxy) -> None:
    worker.process.kill()


def blackhole(_: ServerProcess, link: DelayProxy) -> None:
    link.blackhole()


def nothing(_: ServerProcess, __: DelayProxy) -> None:
    pass


FAULTS: dict[str, Fault] = {"none": nothing, "worker killed": kill, "link silent": blackhole}


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: its tokens, the longest gap after the fault, and passes of width 1, in seconds."""

    token_ids: tuple[int, ...]
    longest_gap_s: float
    passes_s: tuple[float, ...]
    num_accepted_tokens: int


async def stream(address: str, gamma: int, fault: Callable[[], None]) -> Stream:
    """Complete the prompt; `fault` strikes after `FAULT_AT` tokens."""
    token_ids: list[int] = []
    arrivals: list[float] = []
    passes_s: list[float] = []
    num_accepted = 0
    async with open_channel(address) as channel:
        request = CompletionRequest(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, gamma=gamma)
        async for event in RemoteCompleter(channel, address, deadline_s=60).complete(request):
            if not isinstance(event, Delta):
                continue
            struck = len(token_ids) >= FAULT_AT
            token_ids += event.token_ids
            num_accepted += event.num_accepted_tokens
            if struck:
                arrivals.append(time.monotonic())
            elif len(token_ids) >= FAULT_AT:
                arrivals.append(time.monotonic())
                fault()
            if not event.num_draft_tokens and len(token_ids) > 1:
                passes_s.append(event.timings.compute_us / 1e6)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return Stream(tuple(token_ids), max(gaps), tuple(passes_s), num_accepted)


@asynccontextmanager
async def helped(target: ServerProcess, rtt_ms: float) -> AsyncGenerator[tuple[ServerProcess, DelayProxy], None]:
    """Yield a worker that is attached through a link, and the link."""
    async with delay_proxy(target.port, LinkConditions(rtt_s=rtt_ms / 1e3)) as link:
        flags = ("--attach", link.address, "--threads", "1", "--batch", "1")
        worker = server_process("worker", "draft", *flags, port=free_port(), cores=[1], ready_line="attached as")
        async with worker as process:
            yield process, link


async def measure(repeats: int, rtt_ms: float) -> dict[str, list[Stream]]:
    """Return streams by fault; "alone" has no worker."""
    found: dict[str, list[Stream]] = {name: [] for name in ("alone", *FAULTS)}
    port = free_port()
    flags = ("--port", str(port), "--threads", "1", "--batch", "1")
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(server_process("target", "target", *flags, port=port, cores=[0]))
        await stream(target.address, 0, lambda: None)  # warm-up
        for _ in range(repeats):
            found["alone"].append(await stream(target.address, 0, lambda: None))
            for name, fault in FAULTS.items():
                async with helped(target, rtt_ms) as (worker, link):
                    strike = lambda fault=fault, worker=worker, link=link: fault(worker, link)  # noqa: E731
                    found[name].append(await stream(target.address, 8, strike))
                    link.restore()
    return found


def report(found: dict[str, list[Stream]]) -> bool:
    """Print the figures; return whether tokens and pauses are as they must be."""
    pass_s = statistics.median(seconds for one in found["alone"] for seconds in one.passes_s)
    expected = found["alone"][0].token_ids
    pauses = {name: sorted(one.longest_gap_s / pass_s for one in streams) for name, streams in found.items()}
    equal = {name: sum(one.token_ids == expected for one in streams) for name, streams in found.items()}
    accepted = {name: statistics.median(one.num_accepted_tokens for one in found[name]) for name in found}
    print_table(
        f"Longest pause after the fault, in passes of {pass_s * 1e3:.2f} ms (limit {LIMIT_PASSES:g})",
        ["fault", "median", "worst", "draft tokens accepted", "same tokens"],
        [
            [name, f"{statistics.median(values):.2f}", f"{values[-1]:.2f}", f"{accepted[name]:g}",
             f"{equal[name]} of {len(values)}"]
            for name, values in pauses.items()
        ],
    )  # fmt: skip
    results = {"pass_s": pass_s, "pauses_in_passes": pauses, "same_tokens": equal, "accepted": accepted}
    print_json("pool_faults", results)
    return all(equal[name] == len(values) for name, values in pauses.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rtt_ms", type=float, default=2.0)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=precise_event_loop) as runner:
        found = runner.run(measure(args.repeats, args.rtt_ms))
    return 0 if report(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
