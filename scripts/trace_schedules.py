"""Generator of docs/scheduling.png: one prompt under each schedule, traced on a real target and draft worker.

`python scripts/trace_schedules.py [--rtt_ms 6] [--output docs/scheduling.png]` starts both, each on its own core, with
a delay between them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import plot_trace
from specdec.comparison.run.proxy import LinkConditions, delay_proxy, precise_event_loop
from specdec.grpc_comm.channel import open_channel
from specdec.inference.request import Schedule
from specdec.inference.serving.processes import free_port, server_process
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest

PROMPT = "The capital of the country"
NUM_TOKENS = 160
SCHEDULES = {
    "rounds (sync)": (Schedule.SYNC, 0),
    "run-ahead (async)": (Schedule.ASYNC, 0),
    "run-ahead with branches": (Schedule.ASYNC, 3),
}


async def trace(schedule: Schedule, branches: int, rtt_ms: float, directory: Path) -> tuple[Path, Path]:
    """Complete the prompt twice, the first time to warm up; return the trace files of target and draft worker."""
    files = directory / "target.json", directory / "draft.json"
    port, serve = free_port(), free_port()
    target = ["--port", str(port), "--threads", "1", "--batch", "1", "--trace", str(files[0]), "--drafting", "always"]
    async with (
        server_process("target", "target", *target, port=port, cores=[0]),
        delay_proxy(port, LinkConditions(rtt_s=rtt_ms / 1e3)) as link,
    ):
        draft = ["--serve", str(serve), "--port", str(link.port), "--threads", "1", "--batch", "1"]
        draft += ["--branches", str(branches), "--schedule", schedule.value, "--trace", str(files[1])]
        async with server_process("draft", "draft", *draft, port=serve, cores=[1]) as worker:
            await complete(worker.address)
            await asyncio.sleep(0.5)  # plot_trace begins after the longest pause
            await complete(worker.address)
    return files


async def complete(address: str) -> None:
    async with open_channel(address) as channel:
        request = CompletionRequest(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        async for _ in RemoteCompleter(channel, address, deadline_s=60).complete(request):
            pass


async def trace_all(rtt_ms: float, output: Path) -> None:
    panels = []
    with tempfile.TemporaryDirectory() as directory:
        for number, (title, (schedule, branches)) in enumerate(SCHEDULES.items()):
            place = Path(directory) / str(number)
            place.mkdir()
            panels.append((title, await trace(schedule, branches, rtt_ms, place)))
        plot_trace.plot(panels, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt_ms", type=float, default=6.0)
    parser.add_argument("--output", type=Path, default=Path("docs/scheduling.png"))
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=precise_event_loop) as runner:
        runner.run(trace_all(args.rtt_ms, args.output))


if __name__ == "__main__":
    main()
