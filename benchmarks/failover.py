"""Pauses that clients notice when servers are killed at random tokens of running answers.

    python -m benchmarks.failover [--kills 200] [--streams 2] [--seed 1]

Three targets, two serving drafts and two fused servers, all of one model, and a gateway. Clients ask without a break,
at temperature 0.8: through the targets, the drafts and the fused servers (gRPC), through the gateway (HTTP), and from
the command line, as thin client and as a draft of its own. After each random number of pieces of text a server is
killed with SIGKILL, while another of its kind lives, and started again. Every answer must be the undisturbed one. The
pause is the longest gap between two messages of a stream that ran when a server of its kind was killed. Ends with one
line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import httpx

from benchmarks.report import print_json, print_table
from inference.commit import Delta
from inference.config import ROOT, ConnectionConfig
from inference.request import SamplingParams
from inference.serving.processes import ServerProcess, free_port, server_process
from inference.workers.calls.fleet import connected
from inference.workers.completing.failover import FailoverCompleter
from inference.workers.completion import CompletionRequest

PROMPTS = ("1, 2, 3, 4,", "It was the best of times, it was the", "def add(a, b):")
NUM_SEEDS = 2
NUM_TOKENS = 96
TEMPERATURE = 0.8
CLI_LIMIT_S = 180.0
CLI_PAUSE_S = 10.0
"""Seconds between two command lines of one entry, since most of their cost is their start."""
COMMAND_LINES = ("thin client", "own draft")

Question = tuple[str, int]
"""Prompt and seed."""


@dataclass
class Server:
    """Server that is killed and started again under its address."""

    role: str
    flags: tuple[str, ...]
    port: int
    process: ServerProcess | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.stack = AsyncExitStack()
        running = server_process(self.role, self.role, *self.flags, port=self.port)
        self.process = await self.stack.enter_async_context(running)

    async def kill(self) -> None:
        assert self.process is not None
        process, self.process = self.process.process, None
        process.kill()
        await process.wait()
        await self.stack.aclose()


@dataclass
class Cluster:
    """All servers, by kind, and the gateway."""

    servers: dict[str, list[Server]]
    gateway: ServerProcess

    def where(self, kind: str) -> str:
        """Return the value of --target_host for the servers of a kind."""
        return ",".join(server.address for server in self.servers[kind])


@dataclass
class Stream:
    """One answer, as it comes."""

    entry: str
    question: Question
    pieces: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    error: str = ""
    num_kills: int = 0
    on_news: Callable[[], None] = lambda: None

    def came(self, piece: str) -> None:
        self.pieces.append(piece)
        self.arrivals.append(time.monotonic())
        self.on_news()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def longest_gap_s(self) -> float:
        times = self.arrivals
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def target(*flags: str) -> Server:
    port = free_port()
    return Server("target", ("--port", str(port), "--threads", "1", "--batch", "16", *flags), port)


def draft(targets: Sequence[Server]) -> Server:
    port = free_port()
    where = ",".join(server.address for server in targets)
    return Server("draft", ("--serve", str(port), "--target_host", where, "--threads", "1", "--batch", "16"), port)


def fused() -> Server:
    port = free_port()
    return Server("fused_target", ("--port", str(port), "--threads", "1", "--batch", "16"), port)


@asynccontextmanager
async def cluster() -> AsyncGenerator[Cluster, None]:
    targets = [target() for _ in range(3)]
    servers = {"target": targets, "draft": [draft(targets) for _ in range(2)], "fused": [fused() for _ in range(2)]}
    async with AsyncExitStack() as stack:
        for kind in servers.values():
            await asyncio.gather(*(server.start() for server in kind))
        port, http_port = free_port(), free_port()
        where = ",".join(server.address for server in servers["draft"])
        flags = ("--target_host", where, "--http_port", str(http_port))
        gateway = server_process("gateway", "gateway", *flags, port=port, ready_line="HTTP")
        running = await stack.enter_async_context(gateway)
        found = Cluster(servers, ServerProcess("gateway", f"127.0.0.1:{http_port}", running.process, running.log))
        try:
            yield found
        finally:
            for kind in servers.values():
                for server in kind:
                    await server.stack.aclose()


async def ask_grpc(completer: FailoverCompleter, stream: Stream) -> None:
    prompt, seed = stream.question
    sampling = SamplingParams(temperature=TEMPERATURE)
    request = CompletionRequest(prompt, sampling, seed=seed, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    async with aclosing(completer.complete(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                stream.came(event.text)


async def ask_http(client: httpx.AsyncClient, stream: Stream) -> None:
    prompt, seed = stream.question
    body = {"prompt": prompt, "seed": seed, "temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"HTTP {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                stream.came(chunk["choices"][0]["text"])


async def ask_cli(flags: Sequence[str], stream: Stream) -> None:
    """Ask by the command line, which has no --ignore_eos: the answers end where the model ends them."""
    prompt, seed = stream.question
    asked = ("--prompt", prompt, "--seed", str(seed), "--temperature", str(TEMPERATURE), "--format", "json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "main.py"), *flags, *asked, "--max_new_tokens", str(NUM_TOKENS),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(CLI_LIMIT_S):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{stdout.decode()} {stderr.decode()[-500:]}")
    stream.came(json.loads(stdout)["text"])


Asking = Callable[[Stream], Awaitable[None]]


class Load:
    """Clients that ask without a break."""

    def __init__(self, asking: dict[str, Asking], seed: int) -> None:
        self._asking = asking
        self._dice = random.Random(seed)
        self.expected: dict[tuple[bool, Question], str] = {}
        self.running: list[Stream] = []
        self.done: list[Stream] = []
        self.num_pieces = 0
        self._news = asyncio.Event()

    def _came(self) -> None:
        self.num_pieces += 1
        self._news.set()

    async def learn(self) -> None:
        """Record the undisturbed answers; every entry must give the same ones."""
        for prompt in PROMPTS:
            for seed in range(NUM_SEEDS):
                for entry in ("targets", "drafts", "fused", "gateway", "thin client"):
                    stream = await self.ask(entry, (prompt, seed))
                    is_cli = entry == "thin client"
                    known = self.expected.setdefault((is_cli, stream.question), stream.text)
                    if stream.error or stream.text != known:
                        raise RuntimeError(f"{entry} answers {stream.question} otherwise, undisturbed: {stream.error}")

    async def ask(self, entry: str, question: Question) -> Stream:
        stream = Stream(entry, question, on_news=self._came)
        self.running.append(stream)
        try:
            await self._asking[entry](stream)
        except Exception as exc:
            stream.error = f"{type(exc).__name__}: {exc}"
        finally:
            self.running.remove(stream)
        return stream

    async def go_on(self, entry: str) -> None:
        while True:
            if entry in COMMAND_LINES:
                await asyncio.sleep(CLI_PAUSE_S)
            question = (self._dice.choice(PROMPTS), self._dice.randrange(NUM_SEEDS))
            self.done.append(await self.ask(entry, question))

    async def until(self, num_pieces: int) -> None:
        """Wait until `num_pieces` pieces of text have come."""
        while self.num_pieces < num_pieces:
            self._news.clear()
            await self._news.wait()

    def is_same(self, stream: Stream) -> bool:
        is_cli = stream.entry in COMMAND_LINES
        return not stream.error and stream.text == self.expected[is_cli, stream.question]


KINDS = {
    "targets": ("target",),
    "drafts": ("draft", "target"),
    "fused": ("fused",),
    "gateway": ("draft", "target"),
    "thin client": ("draft", "target"),
    "own draft": ("target",),
}
"""Kinds of servers by entry: its streams may notice the death of one."""


async def strike(where: Cluster, load: Load, num_kills: int, *, seed: int, ends_at: float) -> Counter[str]:
    """Kill servers, each at a random token; return the number of kills by kind."""
    dice, killed = random.Random(seed), Counter[str]()
    while sum(killed.values()) < num_kills and time.monotonic() < ends_at:
        due = load.num_pieces + dice.randrange(1, 200)
        await load.until(due)
        kind = dice.choice(["target", "target", "target", "draft", "draft", "fused"])
        victim = dice.choice(where.servers[kind])
        for stream in load.running:
            stream.num_kills += kind in KINDS[stream.entry]
        await victim.kill()
        killed[kind] += 1
        await victim.start()
        print(f"\r{sum(killed.values())} kills, {len(load.done)} answers", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return killed


async def measure(num_kills: int, num_streams: int, *, seed: int, minutes: float) -> tuple[Load, Counter[str]]:
    async with cluster() as where, AsyncExitStack() as stack:
        asking: dict[str, Asking] = {}
        for entry, kind in (("targets", "target"), ("drafts", "draft"), ("fused", "fused")):
            connection = ConnectionConfig(where.where(kind), 1)
            fleet = await stack.enter_async_context(connected(connection))
            asking[entry] = partial(ask_grpc, FailoverCompleter(fleet, connection))
        base = f"http://{where.gateway.address}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=120.0))
        asking["gateway"] = partial(ask_http, client)
        asking["thin client"] = partial(ask_cli, ("--role", "fused_client", "--target_host", where.where("draft")))
        own = ("--role", "draft", "--target_host", where.where("target"), "--threads", "1")
        asking["own draft"] = partial(ask_cli, own)
        load = Load(asking, seed)
        await load.learn()
        entries = [entry for entry in ("targets", "drafts", "fused", "gateway") for _ in range(num_streams)]
        tasks = [asyncio.create_task(load.go_on(entry)) for entry in (*entries, "thin client", "own draft")]
        try:
            ends_at = time.monotonic() + 60 * minutes
            killed = await strike(where, load, num_kills, seed=seed, ends_at=ends_at)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return load, killed


def report(load: Load, killed: Counter[str]) -> bool:
    """Print the figures; return whether every answer is the undisturbed one."""
    by_entry: dict[str, list[Stream]] = defaultdict(list)
    for stream in load.done:
        by_entry[stream.entry].append(stream)
    rows, results = [], {}
    for entry, streams in by_entry.items():
        struck = [each for each in streams if each.num_kills]
        quiet = sorted(each.longest_gap_s for each in streams if not each.num_kills)
        gaps = sorted(each.longest_gap_s for each in struck) if "client" not in entry and "own" not in entry else []
        same = sum(map(load.is_same, streams))
        found = {"answers": len(streams), "struck": len(struck), "same": same, "gaps_s": _spread(gaps)}
        results[entry] = {**found, "quiet_gaps_s": _spread(quiet)}
        rows.append(
            [entry, str(len(streams)), str(len(struck)), f"{same} of {len(streams)}", _shown(gaps), _shown(quiet)]
        )
    title = f"{sum(killed.values())} kills ({dict(killed)}); longest gap of a stream in ms, median / 95% / worst"
    print_table(title, ["entry", "answers", "running at a kill", "same", "with a kill", "without"], rows)
    wrong = [stream for stream in load.done if not load.is_same(stream)]
    for stream in wrong[:10]:
        print(f"{stream.entry} {stream.question}: {stream.error or stream.text}", file=sys.stderr)
    print_json("failover", {"kills": dict(killed), "entries": results, "wrong": len(wrong)})
    return not wrong


def _spread(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    return [statistics.median(values), values[int(0.95 * (len(values) - 1))], values[-1]]


def _shown(values: Sequence[float]) -> str:
    return " / ".join(f"{value * 1e3:.0f}" for value in _spread(values)) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=2, help="of each kind, at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="end then, with fewer kills")
    args = parser.parse_args()
    found = asyncio.run(measure(args.kills, args.streams, seed=args.seed, minutes=args.minutes))
    return 0 if report(*found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
