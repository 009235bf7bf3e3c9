"""Cost of fairness between accounts: `python -m benchmarks.fairness [--emulate target:25ms] [--seconds 5]`.

A gateway and its target share an auth file with two accounts. Over HTTP, many clients of one account ask for long
answers without a pause. In every second window a client of the other account asks for short answers too, one at a time.
The rate of all tokens in such a window is divided by that of the windows before and after it, in which the flood was
alone. The time to a short answer's first token is compared with that of the same prompts before the flood, in loaded
passes: the mean gap between two commits of a long answer while the flood is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.decoding import read_prompts
from benchmarks.report import print_json, print_table
from comparison.plan.config import WorkloadConfig
from comparison.plan.endpoint import Endpoint
from comparison.run.http_client import HttpClient, http_client
from inference.cli.roles.token import new_token
from inference.config import ROOT, DialSecurity
from inference.serving.processes import free_port, server_process

RIGHTS = {"flood": ("client",), "short": ("client",), "gateway": ("client", "ops")}
NUM_PROMPTS = 12
SHORT_TOKENS = 8
CPU_S = "process_cpu_seconds_total"
LOOK_S = 0.1
"""Seconds between two looks at the target's slots."""


@dataclass
class Found:
    """Figures of one run.

    Attributes:
        alone, beside: tokens per second of each window without and with short answers; one more of the first.
        alone_cpu, beside_cpu: the same per second of the target's CPU time, which a busy machine spoils least.
        pass_s: seconds of a loaded pass, for each window of the flood alone.
        own_s, beside_s: seconds to the first tokens of short answers, before the flood and beside it.
        num_looks, num_idle: looks at the target while requests waited, and those that found a slot free.
    """

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone_cpu: list[float] = field(default_factory=list)
    beside_cpu: list[float] = field(default_factory=list)
    pass_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    num_looks: int = 0
    num_idle: int = 0

    def delays(self) -> list[float]:
        """Return how many loaded passes later each first token came than without the flood, sorted."""
        own_s, pass_s = statistics.median(self.own_s), statistics.median(self.pass_s)
        return sorted((each - own_s) / pass_s for each in self.beside_s)


def ratios(beside: list[float], alone: list[float]) -> list[float]:
    """Return the rate of each window with short answers, over the mean of the two around it."""
    around = itertools.pairwise(alone)
    return [rate / statistics.fmean(pair) for rate, pair in zip(beside, around, strict=True)]


@dataclass(frozen=True)
class Scene:
    """Client of each account, and the target's metrics."""

    clients: dict[str, HttpClient]
    metrics: httpx.AsyncClient

    async def sums(self) -> dict[str, float]:
        """Return the values of the target's metrics, with the time in seconds as `at`."""
        text = (await self.metrics.get("/metrics")).raise_for_status().text
        samples = (each for family in text_string_to_metric_families(text) for each in family.samples)
        return {each.name: each.value for each in samples} | {"at": time.monotonic()}

    async def first_token_s(self, account: str, prompt: str) -> float:
        """Wait for a whole answer; return the seconds to its first token.

        Raises:
            SystemExit: the request failed.
        """
        record = await self.clients[account].complete(prompt, 0, None)
        if record.error_code is not None:
            raise SystemExit(f"{account}: {record.error_message}")
        return record.rounds[0].arrived_s


def main() -> None:
    args = _parser().parse_args()
    found = asyncio.run(_measure(args))
    rates, delays = ratios(found.beside, found.alone), found.delays()
    by_cpu = ratios(found.beside_cpu, found.alone_cpu)
    rows = [
        ["tokens/s of the flood alone", f"{statistics.median(found.alone):.0f}"],
        ["tokens/s with short answers beside it / alone (quartiles)", _quartiles(rates)],
        ["the same by the target's CPU time", _quartiles(by_cpu)],
        ["loaded pass", f"{statistics.median(found.pass_s) * 1e3:.1f} ms"],
        ["first token of a short answer without the flood", f"{statistics.median(found.own_s) * 1e3:.0f} ms"],
        [f"beside it ({len(delays)} answers)", f"{statistics.median(found.beside_s) * 1e3:.0f} ms"],
        [
            "loaded passes that it came later: median, 95 %, worst",
            ", ".join(f"{delays[round(share * (len(delays) - 1))]:.1f}" for share in (0.5, 0.95, 1)),
        ],
        ["looks at the slots while requests waited; a slot was free", f"{found.num_looks}; {found.num_idle}"],
    ]
    title = f"{args.clients} clients of one account on {args.batch} slots, one client of another; {args.emulate}"
    print_table(title.removesuffix("; "), ["figure", "value"], rows)
    print_json("fairness", {**vars(found), "ratios": rates, "by_cpu": by_cpu, "delays": delays})


def _quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--clients", type=int, default=200, help="of the flood (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="slots of the target (%(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="of a long answer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="windows with short answers (%(default)s)")
    parser.add_argument("--emulate", default="", help="least times of passes, as in the servers' flag")
    return parser


async def _measure(args: argparse.Namespace) -> Found:
    found, prompts = Found(), read_prompts(ROOT / "prompts" / "open_ended.txt", NUM_PROMPTS)
    async with _scene(args) as scene, asyncio.TaskGroup() as tasks:
        found.own_s = [await scene.first_token_s("short", prompt) for prompt in prompts]
        endless = [tasks.create_task(_repeat(scene, prompts[i % NUM_PROMPTS])) for i in range(args.clients)]
        await asyncio.sleep(args.seconds)
        endless.append(tasks.create_task(_look(scene, args.batch, found)))
        await _alone(scene, args.seconds, found)
        for _ in range(args.rounds):
            await _beside(scene, args.seconds, found, prompts)
            await _alone(scene, args.seconds, found)
        for task in endless:
            task.cancel()
    return found


async def _repeat(scene: Scene, prompt: str) -> None:
    while True:
        await scene.first_token_s("flood", prompt)


async def _look(scene: Scene, num_slots: int, found: Found) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        now = await scene.sums()
        if now["vllm:num_requests_waiting"]:
            found.num_looks += 1
            found.num_idle += now["vllm:num_requests_running"] < num_slots


async def _alone(scene: Scene, seconds: float, found: Found) -> None:
    before = await scene.sums()
    await asyncio.sleep(seconds)
    after = await scene.sums()
    found.alone.append(_rate(before, after, "at"))
    found.alone_cpu.append(_rate(before, after, CPU_S))
    gaps = "vllm:inter_token_latency_seconds"
    num_gaps = after[f"{gaps}_count"] - before[f"{gaps}_count"]
    found.pass_s.append((after[f"{gaps}_sum"] - before[f"{gaps}_sum"]) / num_gaps)


async def _beside(scene: Scene, seconds: float, found: Found, prompts: list[str]) -> None:
    before = await scene.sums()
    while time.monotonic() < before["at"] + seconds:
        prompt = prompts[len(found.beside_s) % NUM_PROMPTS]
        found.beside_s.append(await scene.first_token_s("short", prompt))
    after = await scene.sums()
    found.beside.append(_rate(before, after, "at"))
    found.beside_cpu.append(_rate(before, after, CPU_S))


def _rate(before: dict[str, float], after: dict[str, float], seconds: str) -> float:
    tokens = "vllm:generation_tokens_total"
    return (after[tokens] - before[tokens]) / (after[seconds] - before[seconds])


@asynccontextmanager
async def _scene(args: argparse.Namespace) -> AsyncGenerator[Scene, None]:
    """Start a target and its gateway; yield their clients."""
    port, metrics_port, http_port = free_port(), free_port(), free_port()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-fairness-")))
        tokens = {name: _token_file(folder, name) for name in RIGHTS}
        auth = ("--auth_file", str(folder / "auth.toml"))
        flags = ["--batch", str(args.batch), "--max_waiting", str(args.clients), "--threads", "1", "--port", str(port)]
        flags += ["--emulate", args.emulate] * bool(args.emulate)
        flags += ["--metrics_port", str(metrics_port)]
        target = server_process("target", "target", *flags, *auth, port=port, ready_line="serving on")
        await stack.enter_async_context(target)
        dialling = ("--port", str(port), "--token_file", str(tokens["gateway"]), "--http_port", str(http_port))
        gateway = server_process("gateway", "gateway", *dialling, *auth, port=port, ready_line="HTTP on http")
        await stack.enter_async_context(gateway)
        clients = {}
        for name, num_tokens in (("flood", args.tokens), ("short", SHORT_TOKENS)):
            security = DialSecurity(token_file=tokens[name])
            endpoint = Endpoint(name, f"http://127.0.0.1:{http_port}/v1", security)
            workload = WorkloadConfig(max_new_tokens=num_tokens, ignore_eos=True, deadline_s=600.0)
            clients[name] = await stack.enter_async_context(http_client(endpoint, workload))
        headers = {"Authorization": f"Bearer {tokens['gateway'].read_text()}"}
        metrics = httpx.AsyncClient(base_url=f"http://127.0.0.1:{metrics_port}", headers=headers, timeout=30)
        yield Scene(clients, await stack.enter_async_context(metrics))


def _token_file(folder: Path, name: str) -> Path:
    """Put an account into the auth file; return a file with its token."""
    file = folder / f"{name}.token"
    speaks = name == "gateway"
    file.write_text(new_token(folder / "auth.toml", name, RIGHTS[name], speaks_for_others=speaks), encoding="utf-8")
    return file


if __name__ == "__main__":
    main()
