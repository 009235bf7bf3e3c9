"""Demo of a Ray cluster on one machine, with figures: load, a killed node, from one target to three and back.

Run by `make ray-demo`, on Linux, where each node has its own loopback address, as separate machines would. Every answer
is compared with the first target's undisturbed one. Ray's processes get a new folder and token, and end with this
script.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port

NUM_NODES, NUM_GATEWAYS = 3, 2
NUM_TOKENS = 300
NUM_SLOTS, CROWD = 5, 10
"""Slots of a target, and number of concurrent clients: they fill two targets, which is more than `scaling.FULL`."""
PROMPTS = ("1, 2, 3,", "Once upon a time", "The little dog", "and the wind", "One day, Lily", "The sun")
PATIENCE_S = 120.0
WORKER = {"num_cpus": 0.1, "resources": {"target": 1}}
EDGE = {"num_cpus": 0.1, "resources": {"edge": 0.1}}
HEAD = {"num_cpus": 0.1, "resources": {"node:__internal_head__": 0.001}}
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": NUM_NODES,
    "upscale_delay_s": 1,
    "downscale_delay_s": 4,
    "look_back_period_s": 2,
    "metrics_interval_s": 1,
    "policy": {"policy_function": "deploy.ray.scaling:by_slots"},
}


class Town:
    """Ray cluster; every node but the head has room for one target and one gateway, all gateways at one port."""

    def __init__(self, cluster: Any, folder: str) -> None:
        self._cluster = cluster
        self.folder = folder
        self._port = free_port()
        self.gateways: list[str] = []

    def add_node(self) -> None:
        host = f"127.0.0.{2 + len(self.gateways)}"
        self._cluster.add_node(num_cpus=2, resources={"target": 1, "edge": 1}, node_ip_address=host)
        self.gateways.append(f"http://{host}:{self._port}")

    def serve(self, **options: Any) -> None:
        """Start targets with these `options`, a draft worker and gateways; return when they serve."""
        from ray import serve

        from deploy.ray.replicas import Draft, Gateway, Target, application

        serve.start(proxy_location="Disabled")
        one, several = ["--threads", "1"], ["--threads", "1", "--batch", str(NUM_SLOTS), "--grace_s", "30"]
        lists = "--insecure"  # their lists of targets could name other machines
        edge = {"num_replicas": NUM_GATEWAYS, "max_replicas_per_node": 1, "ray_actor_options": EDGE}
        applications = {
            "targets": application(Target, {"flags": several}, ray_actor_options=WORKER, **options),
            "drafts": application(Draft, {"flags": [*one, lists], "host": "127.0.0.1"}, ray_actor_options=HEAD),
            "gateways": application(Gateway, {"flags": ["--http_port", str(self._port), lists]}, **edge),
        }
        for name, each in applications.items():
            serve.run(each, name=name, route_prefix=None)

    async def targets(self) -> dict[str, str]:
        """Return the address of each node's target, by node id."""
        from deploy.ray.registry import registry

        leases = await registry().leases.remote()
        return {lease.node: lease.address for lease in leases.values()}

    async def until(self, condition: Callable[[dict[str, str]], bool]) -> float:
        """Wait until the targets meet a condition; return how many seconds it took.

        Raises:
            TimeoutError: the condition was not met within `PATIENCE_S`.
        """
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if condition(await self.targets()):
                    return time.monotonic() - began
                await asyncio.sleep(0.1)

    async def kill(self, node_id: str) -> None:
        """Kill all processes of a node at once, as if the machine lost its power."""
        import psutil

        node = next(each for each in self._cluster.worker_nodes if each.node_id == node_id)
        (raylet,) = node.all_processes["raylet"]
        processes = [psutil.Process(raylet.process.pid)]
        for process in [*processes, *processes[0].children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._cluster.remove_node, node, allow_graceful=False)


def processes_of(place: Town) -> dict[int, str]:
    """Return the command lines of a cluster's processes by id: Ray's, and the servers below them."""
    import psutil

    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == place.folder:
                found[process.pid] = " ".join(process.cmdline())
    return found


@contextmanager
def town(num_nodes: int = NUM_NODES) -> Generator[Town, None, None]:
    """Yield a cluster on this machine, which ends with the block."""
    folder = tempfile.mkdtemp(prefix="specdec-")
    os.environ.update(TMPDIR=folder, RAY_TMPDIR=folder, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="1")
    os.environ["PYTHONPATH"] = str(ROOT)  # Ray's workers import this project
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        place = Town(cluster, folder)
        for _ in range(num_nodes):
            place.add_node()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield place
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Answers:
    """Counts and times of all clients in one part of the demo; times in seconds."""

    num_done: int = 0
    num_failed: int = 0
    num_other: int = 0
    num_again: int = 0
    num_tokens: int = 0
    first_after: list[float] = field(default_factory=list)
    longest_gap: float = 0.0
    lasted: float = 0.0


class Clients:
    """Clients that stream answers from gateways and compare them with the undisturbed ones.

    A client that loses its gateway asks the next one for the whole answer.
    """

    def __init__(self, gateways: Sequence[str]) -> None:
        self._http = httpx.AsyncClient(timeout=PATIENCE_S)
        self._gateways = gateways
        self._expected: dict[int, str] = {}

    async def learn(self) -> Answers:
        """Send all prompts one after the other, and keep the answers: later ones are compared with them."""
        answers = Answers()
        began = time.monotonic()
        for number in range(len(PROMPTS)):
            self._expected[number] = await self._ask(number, answers)
        answers.lasted = time.monotonic() - began
        return answers

    async def during(self, num_clients: int, what: Callable[[], Awaitable[Any]]) -> Answers:
        """Run clients that ask without a break while `what` runs; return once their last answers have ended."""
        answers, over, began = Answers(), asyncio.Event(), time.monotonic()

        async def one(number: int) -> None:
            while not over.is_set():
                number = (number + 1) % len(PROMPTS)
                try:
                    text = await self._ask(number, answers)
                    answers.num_other += text != self._expected[number]
                except (httpx.HTTPError, RuntimeError):
                    answers.num_failed += 1

        clients = [asyncio.create_task(one(number)) for number in range(num_clients)]
        try:
            await what()
        finally:
            over.set()
            await asyncio.gather(*clients)
        answers.lasted = time.monotonic() - began
        return answers

    async def _ask(self, number: int, answers: Answers) -> str:
        """Return one answer's text.

        Raises:
            httpx.TransportError: no gateway can be reached.
            RuntimeError: the gateway reports a failure.
        """
        first = number % len(self._gateways)
        *others, last = (*self._gateways[first:], *self._gateways[:first])
        for gateway in others:
            try:
                return await self._ask_at(gateway, number, answers)
            except httpx.ConnectError:  # no gateway runs there
                continue
            except httpx.TransportError:
                answers.num_again += 1
        return await self._ask_at(last, number, answers)

    async def _ask_at(self, gateway: str, number: int, answers: Answers) -> str:
        body = {"prompt": PROMPTS[number], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        text, last, began = "", 0.0, time.monotonic()
        shape = {"temperature": 0.8, "seed": number, "stream": True}
        async with self._http.stream("POST", f"{gateway}/v1/completions", json={**body, **shape}) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line.removeprefix("data: ")), time.monotonic()
                if "error" in event:
                    raise RuntimeError(event["error"])
                if last:
                    answers.longest_gap = max(answers.longest_gap, now - last)
                else:
                    answers.first_after.append(now - began)
                last = now
                text += event["choices"][0]["text"]
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}")
        answers.num_done += 1
        answers.num_tokens += NUM_TOKENS
        return text


async def show(place: Town) -> int:
    """Run all parts and print the table; return how many answers were lost or differed."""
    clients, table, wrong = Clients(place.gateways), Table(title="Ray on one machine", box=box.SIMPLE), 0
    for head in ("part", "targets", "same answer", "asked again", "tokens/s", "TTFT p50", "longest gap", "took"):
        table.add_column(head, justify="left" if head in ("part", "took") else "right", no_wrap=True)

    def row(name: str, targets: str, answers: Answers, took: str = "") -> None:
        nonlocal wrong
        wrong += answers.num_failed + answers.num_other
        same = f"{answers.num_done - answers.num_other} of {answers.num_done + answers.num_failed}"
        first = f"{statistics.median(answers.first_after or [0.0]):.2f} s"
        speed, gap = f"{answers.num_tokens / answers.lasted:.0f}", f"{answers.longest_gap:.2f} s"
        table.add_row(name, targets, same, str(answers.num_again), speed, first, gap, took)
        print(f"  {name}: {took or 'done'}", flush=True)

    took: list[float] = []

    async def until(num_targets: int) -> None:
        took.append(await place.until(lambda targets: len(targets) == num_targets))
        await asyncio.sleep(3.0)

    async def power_cut() -> None:
        await until(NUM_NODES)
        dead, *_ = await place.targets()
        await place.kill(dead)
        took.append(await place.until(lambda targets: dead not in targets))
        await asyncio.sleep(3.0)

    row("undisturbed, one at a time", "1", await clients.learn())
    row(f"{CROWD} clients", "1 -> 3", await clients.during(CROWD, lambda: until(3)), f"3 after {took[-1]:.1f} s")
    row("a node is killed", "3 -> 2", await clients.during(CROWD, power_cut), f"known after {took[-1]:.1f} s")
    place.add_node()  # Ray needs the main thread
    row("another node comes", "2 -> 3", await clients.during(CROWD, lambda: until(3)), f"3 after {took[-1]:.1f} s")
    row("2 clients stay", "3 -> 1", await clients.during(2, lambda: until(1)), f"1 after {took[-1]:.1f} s")
    Console(width=112).print(table)
    return wrong


def main() -> int:
    print("A head and 3 nodes, one target on a node at most; a minute or two ...", flush=True)
    with town() as place:
        place.serve(autoscaling_config=AUTOSCALING)
        wrong = asyncio.run(show(place))
    print("every answer was the undisturbed one" if not wrong else f"{wrong} answers were lost or different")
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
