"""Check of the comparison's clients: their figures are divided by those that the server itself knows.

    python -m benchmarks.clients [--streams 32] [--rounds 10] [--first_ms 20]

The server is benchmarks/known_times.py, in a process of its own. The clients are those of compare_architectures.py: for
HTTP, for gRPC, and Locust where it is installed. All streams begin at once, and send two requests each. The table has,
for TTFT and tokens/s, the client's figure over the server's; the delay until the server has read a request, and the one
until the client has read its first token; and the client's share of a core. Needs two quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

import numpy as np

from benchmarks.known_times import known_times, serve
from benchmarks.report import print_json, print_table
from specdec.comparison.plan.config import Contender, PromptSet, Topology, WorkloadConfig
from specdec.comparison.plan.endpoint import Endpoint
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.run.client import Client, asking
from specdec.comparison.run.grpc_client import grpc_client, request_of
from specdec.comparison.run.http_client import http_client
from specdec.comparison.run.load import by_locust, closed_loop
from specdec.comparison.run.measurement import timed
from specdec.inference.config import PLAIN
from specdec.inference.serving.processes import free_port

PERCENTILES = (50, 90, 99)
HEADER = ["client", *(f"TTFT p{p}" for p in PERCENTILES), "tokens/s", "request read", "token read", "share of a core"]
Load: TypeAlias = Callable[[], Awaitable[tuple[list[RequestRecord], float]]]


async def measured(load: Load, rounds: int) -> tuple[list[list[RequestRecord]], float]:
    """Run a load after a warm-up; return the records of each round, and the client's median share of a CPU core."""
    found = [await load() for _ in range(rounds + 1)][1:]
    return [records for records, _ in found], float(np.median([share for _, share in found]))


def row(name: str, rounds: Sequence[Sequence[RequestRecord]], share: float) -> list[str]:
    """Return one client's table row: its TTFT and tokens/s over the server's own, its delays, its share of a core."""
    records = [record for each in rounds for record in each]
    known = [known_times(record) for record in records]
    ours, true = ([record.stats.ttft_s for record in records], [sent[0] - read for read, sent in known])
    ratios = [np.percentile(ours, p) / np.percentile(true, p) for p in PERCENTILES]
    requests = [read - record.sent_s for record, (read, _) in zip(records, known, strict=True)]
    tokens = [it.sent_s + it.stats.ttft_s - sent[0] for it, (_, sent) in zip(records, known, strict=True)]
    late = [f"{np.median(each) * 1e3:.2f}, p99 {np.percentile(each, 99) * 1e3:.2f} ms" for each in (requests, tokens)]
    return [name, *(f"{it:.3f}" for it in [*ratios, _speed_ratio(rounds)]), *late, f"{share:.0%}"]


def _speed_ratio(rounds: Sequence[Sequence[RequestRecord]]) -> float:
    """Return the client's tokens/s over the server's, the median of the rounds."""
    ratios = []
    for records in rounds:
        known = [known_times(record) for record in records]
        true_s = max(sent[-1] for _, sent in known) - min(read for read, _ in known)
        ours_s = max(it.sent_s + it.stats.end_to_end_s for it in records) - min(it.sent_s for it in records)
        ratios.append(true_s / ours_s)
    return float(np.median(ratios))


async def run(args: argparse.Namespace, http_port: int, grpc_port: int) -> None:
    """Measure each client, print the table, and a line of JSON last."""
    prompts = tuple(f"prompt {number}" for number in range(args.streams))
    workload, asked = WorkloadConfig((PromptSet("kind", prompts),), deadline_s=60.0), Contender(Topology.TARGET)
    address = f"127.0.0.1:{grpc_port}"

    def by(client: Client) -> Load:
        return lambda: timed(closed_loop(asking(client, prompts), args.streams, args.streams))

    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(http_client(Endpoint("h", f"http://127.0.0.1:{http_port}/v1"), workload))
        grpc = await stack.enter_async_context(grpc_client(address, PLAIN, workload, asked))
        requests = [request_of(prompt, workload, asked) for prompt in prompts]
        loads = {"HTTP": by(http), "gRPC": by(grpc)}
        if importlib.util.find_spec("locust"):
            loads["Locust"] = lambda: by_locust(address, requests, concurrency=args.streams, deadline_s=60.0)
        rows = [row(name, *await measured(load, args.rounds)) for name, load in loads.items()]
    print_table(f"{args.streams} streams, first token after {args.first_ms:g} ms", HEADER, rows)
    print_json("clients", {"streams": args.streams, "first_ms": args.first_ms})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--first_ms", type=float, default=20.0)
    args, ports = parser.parse_args(), (free_port(), free_port())
    context = multiprocessing.get_context("spawn")
    served = (ports, args.first_ms / 1e3, ready := context.Event())
    server = context.Process(target=serve, args=served, daemon=True)
    server.start()
    ready.wait()
    try:
        asyncio.run(run(args, *ports))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
