"""The servers of the suites in tests/suites: real processes of the bundled models, which can be killed and restarted.

    clients -> target <- worker (pool)        gateway -> draft -> target        fused (gRPC and HTTP)

With `linked`, the draft server, the worker, the gateway and the target's clients each connect through a proxy of their
own that can be cut, silenced and slowed down.
"""

from __future__ import annotations

import asyncio
import re
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from specdec.comparison.run.proxy import DelayProxy, delay_proxy
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.health import is_serving
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.serving.processes import ServerProcess, free_port, server_process
from tests.support.clients import Ask, ask_http, ask_on, touch
from tests.support.servers import DRAFTS
from tests.support.vitals import Vitals, vitals

NUM_SLOTS = 8
COMMON = ("--threads", "1", "--batch", str(NUM_SLOTS))
IMPATIENT = ("--stall_timeout_s", "5")
PROMPT_LENGTH = 2000
"""Prompt length, in tokens, that fills a sequence's whole part (slot) of the bundled models' KV cache."""
SETTLE_S = 60.0
"""Seconds after which every KV-cache slot is free and every restarted server ready; idle sessions time out after 5."""


@dataclass
class Member:
    """A server of the cluster, whose ports stay the same after a restart.

    Attributes:
        role: value of its flag `--role`.
        flags: its other flags.
        logs: folder that gets a log file for each start.
        port: gRPC port; 0 if the server has none.
        http_port: port of the HTTP API; 0 if the server has none.
        metrics_port: port of /metrics.
        probe_port: port of /livez and /readyz; 0 if the server has none.
        ready_line: text in the log that shows that the server is ready; None if its gRPC health check shows it.
    """

    name: str
    role: str
    flags: tuple[str, ...]
    logs: Path
    port: int = 0
    http_port: int = 0
    metrics_port: int = 0
    probe_port: int = 0
    ready_line: str | None = None
    server: ServerProcess | None = None
    _life: AsyncExitStack = field(default_factory=AsyncExitStack)
    _num_lives: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self.server is not None
        return self.server.process.pid

    @property
    def is_alive(self) -> bool:
        return self.server is not None and self.server.process.returncode is None

    async def start(self) -> None:
        """Start the server, and return once it is ready; it runs until `stop`, or until it dies."""
        self._num_lives += 1
        log = self.logs / f"{self.name}.{self._num_lives}.log"
        process = server_process(
            self.name, self.role, *self.flags, port=self.port, ready_line=self.ready_line, log_file=log
        )
        self.server = await self._life.enter_async_context(process)

    async def stop(self) -> None:
        if self.is_alive:
            self.send(signal.SIGCONT)
        await self._life.aclose()

    async def restart(self) -> float:
        """Stop the server and start it on the same ports; return the seconds until it was ready."""
        began = time.monotonic()
        await self.stop()
        await self.start()
        return time.monotonic() - began

    async def end(self) -> None:
        """Send SIGTERM, as Kubernetes does, and wait until the server's process has ended."""
        assert self.server is not None
        self.send(signal.SIGTERM)
        await self.server.process.wait()

    async def is_ready(self) -> bool:
        """Return whether /readyz succeeds, tried twice: a Kubernetes Service drops a pod after two failed probes."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.probe_port}", timeout=5) as kubelet:
            for _ in range(2):
                with suppress(httpx.TransportError):
                    if (await kubelet.get("/readyz")).status_code == 200:
                        return True
        return False

    def send(self, number: signal.Signals) -> None:
        assert self.server is not None
        self.server.process.send_signal(number)

    @property
    def branch_slots_mib(self) -> float:
        """MiB of the KV-cache slots that only alternative draft branches use, computed from figures in the log."""
        assert self.server is not None
        log = self.server.log.read_text()
        sizes = re.findall(r"slots of \d+ tokens, ([\d.]+) MB each", log)
        branches = re.findall(r"(\d+) of the slots are for branches", log)
        return sum(int(count) * float(sizes[-1]) for count in branches) * 1e6 / 2**20

    @property
    def vitals(self) -> Vitals:
        return vitals(self.pid)

    async def gauges(self) -> dict[str, float]:
        """Read /metrics; return the values by metric name; of several series of one metric, the last one's."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        async with httpx.AsyncClient(timeout=60) as client:
            lines = (await client.get(url)).text.splitlines()
        return {
            re.split(r"[{ ]", line)[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
        }

    async def num_requests(self) -> int:
        """Return the number of requests that the server runs or has queued, from its metrics."""
        gauges = await self.gauges()
        return int(gauges["vllm:num_requests_running"] + gauges["vllm:num_requests_waiting"])


class Cluster:
    """Servers by name, proxies by the name of the side that connects (none if not `linked`), and the logs' folder."""

    def __init__(self, members: dict[str, Member], links: dict[str, DelayProxy], logs: Path) -> None:
        self.members = members
        self.links = links
        self._logs = logs

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def tracebacks(self) -> list[str]:
        """Return a line per traceback in the servers' logs: log file, the line before, and the exception."""
        found = []
        for log in sorted(self._logs.iterdir()):
            before, *blocks = log.read_text(errors="replace").split("Traceback (most recent call last):\n")
            for block in blocks:
                lines = block.splitlines()
                end = next((line for line in lines if not line.startswith(" ")), "")
                found.append(f"{log.name}: {before.rstrip().rpartition(chr(10))[2]}: {end}")
                before = block
        return found

    async def card(self) -> pb.GetModelResponse:
        """Return the target's description of its model."""
        async with open_channel(self["target"].address) as channel:
            stub = rpc.GenerationServiceStub(channel)
            card: pb.GetModelResponse = await stub.GetModel(pb.GetModelRequest(), timeout=60)
        return card

    async def ways(self, stack: AsyncExitStack) -> dict[str, Ask]:
        """Connect to the servers; return functions that send a question to one of them.

        The keys are the server's name for gRPC, and "NAME over HTTP". The connections close with `stack`.
        """
        found: dict[str, Ask] = {}
        for name in ("target", "draft", "fused"):
            found[name] = partial(ask_on, await stack.enter_async_context(open_channel(self[name].address)))
        for name in ("gateway", "fused"):
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=self[name].url, timeout=120))
            found[f"{name} over HTTP"] = partial(ask_http, client)
        return found

    async def touch(self) -> dict[str, float]:
        """Let requests write every KV-cache slot once; return each server's resident memory in MiB after it.

        Slots for alternative draft branches are not written, so their memory is added, as the log has it.
        """
        for name in ("target", "draft", "fused"):
            await touch(self.members[name].address, PROMPT_LENGTH, NUM_SLOTS)
        return {name: member.vitals.rss_mib + member.branch_slots_mib for name, member in self.members.items()}

    async def settled(self) -> bool:
        """Wait until every server is alive, ready and without requests; return False if that takes over SETTLE_S."""
        try:
            async with asyncio.timeout(SETTLE_S):
                for member in self.members.values():
                    while not await _is_idle(member):  # noqa: ASYNC110 - it is another process
                        await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True


async def _is_idle(member: Member) -> bool:
    """Return whether a server is alive and ready, and has no request running or queued."""
    if not member.is_alive:
        return False
    if member.port:
        async with open_channel(member.address) as channel:
            if not await is_serving(channel):
                return False
    if member.http_port:
        async with httpx.AsyncClient(base_url=member.url, timeout=60) as client:
            if (await client.get("/readyz")).status_code != 200:
                return False
    return await member.num_requests() == 0


@asynccontextmanager
async def cluster(names: Collection[str], *, linked: bool = False) -> AsyncGenerator[Cluster, None]:
    """Run the servers of these names until the block is left: target, draft, worker, gateway, fused (both models).

    With `linked`, they connect to each other through proxies, which the cluster has in `links`.
    """
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-cluster-")))
        members = {
            name: _PLANS[name](logs) for name in ("target", "draft", "worker", "gateway", "fused") if name in names
        }
        ways = {"client": "target", "draft": "target", "worker": "target", "gateway": "draft"}
        links = {}
        if linked:
            for name, behind in ways.items():
                links[name] = await stack.enter_async_context(delay_proxy(members[behind].port))
        for name, behind in ways.items():
            if name in members:
                front = links[name].port if linked else members[behind].port
                members[name].flags += (
                    ("--attach", f"127.0.0.1:{front}") if name == "worker" else ("--port", str(front))
                )
        for wave in (("target", "fused"), ("draft", "worker"), ("gateway",)):
            starting = [members[name] for name in wave if name in members]
            for member in starting:
                stack.push_async_callback(member.stop)
            await asyncio.gather(*(member.start() for member in starting))
        yield Cluster(members, links, logs)


def _target(logs: Path) -> Member:
    port, metrics = free_port(), free_port()
    common = (*COMMON, *IMPATIENT, *DRAFTS)
    flags = (*common, "--port", str(port), "--metrics_port", str(metrics), "--idle_timeout_s", "5")
    return Member("target", "target", flags, logs, port=port, metrics_port=metrics)


def _draft(logs: Path) -> Member:
    port, metrics = free_port(), free_port()
    flags = (*COMMON, *IMPATIENT, "--serve", str(port), "--metrics_port", str(metrics), "--reconnect_timeout_s", "60")
    return Member("draft", "draft", flags, logs, port=port, metrics_port=metrics)


def _worker(logs: Path) -> Member:
    port, metrics = free_port(), free_port()
    flags = (*COMMON, "--serve", str(port), "--metrics_port", str(metrics))
    return Member("worker", "draft", flags, logs, port=port, metrics_port=metrics)


def _gateway(logs: Path) -> Member:
    port = free_port()
    flags = ("--http_port", str(port), *IMPATIENT)
    return Member("gateway", "gateway", flags, logs, http_port=port, metrics_port=port, ready_line="HTTP on http")


def _fused(logs: Path) -> Member:
    port, http, metrics = free_port(), free_port(), free_port()
    flags = (
        "--port",
        str(port),
        "--http_port",
        str(http),
        "--metrics_port",
        str(metrics),
        *COMMON,
        *DRAFTS,
        *IMPATIENT,
    )
    return Member("fused", "fused_target", flags, logs, port=port, http_port=http, metrics_port=metrics)


_PLANS = {"target": _target, "draft": _draft, "worker": _worker, "gateway": _gateway, "fused": _fused}
