"""How requests come: one after another, on their own at a rate (an open loop), or from many clients at once.

Many clients are Locust with a gRPC user on gevent, in a process of its own. gevent in a process with asyncio or torch
would stall both, so nothing of Locust is imported here: requests go out in one JSON file, records come back in another.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference.comparison.plan.config import Contender, WorkloadConfig
from inference.comparison.run.client import Ask
from inference.comparison.run.record import RequestRecord, record_from_json
from inference.config import ROOT
from inference.errors import ConfigError, UnavailableError

LOCUST_FILE = Path(__file__).with_name("locust_user.py")
REQUESTS_PER_USER = 2
START_S = 30.0
"""For Locust to start and connect."""


async def one_by_one(ask: Ask, count: int) -> list[RequestRecord]:
    """Ask for each of `count` prompts when the one before it is answered."""
    return [record for index in range(count) for record in await ask(index, time.monotonic())]


async def several_at_once(ask: Ask, count: int, concurrency: int) -> list[RequestRecord]:
    """Ask for `count` prompts, which take turns, and always for so many at once; as often as `run_at_once` does."""
    waiting = iter(range(max(count, REQUESTS_PER_USER * concurrency)))

    async def client() -> list[RequestRecord]:
        return [record for number in waiting for record in await ask(number % count, time.monotonic())]

    return list(itertools.chain(*await asyncio.gather(*(client() for _ in range(concurrency)))))


async def as_they_come(ask: Ask, count: int, arrivals_s: Sequence[float]) -> list[RequestRecord]:
    """Ask at these times, in seconds from now, whatever is still unanswered; `count` prompts take turns.

    A request's times count from when it was to be sent. So if the server, or this process, is held up, what comes due
    meanwhile is late too, and counts as late (no coordinated omission).
    """
    began = time.monotonic()

    async def ask_at(number: int, due_s: float) -> list[RequestRecord]:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        return await ask(number % count, due_s)

    asked = (ask_at(number, began + arrival_s) for number, arrival_s in enumerate(arrivals_s))
    return list(itertools.chain(*await asyncio.gather(*asked)))


def poisson_arrivals(request_rate: float, count: int, seed: Sequence[int]) -> list[float]:
    """Times, in seconds, at which `count` independent users come, `request_rate` of them per second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, count)
    return [float(at) for at in np.cumsum(gaps)]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What the Locust users are told.

    Attributes:
        address: HOST:PORT of the service.
        requests: (prompt index, prompt), taken by whichever user is free.
        gamma, schedule: None leaves them to the server.
    """

    address: str
    requests: tuple[tuple[int, str], ...]
    max_new_tokens: int
    temperature: float
    seed: int
    gamma: int | None
    schedule: str | None
    deadline_s: float
    ignore_eos: bool = False


def require_locust() -> None:
    """Refuse concurrency without the extra.

    Raises:
        ConfigError: Locust is not installed; the message says how to install it.
    """
    _require("locust", "concurrency above 1 is driven by Locust", "loadtest")


def require_http() -> None:
    """Refuse endpoints of HTTP without the extra.

    Raises:
        ConfigError: a package of it is not installed; the message says how to install it.
    """
    for package in ("httpx", "httpx_sse"):
        _require(package, f"an endpoint of HTTP is asked with {package}", "endpoints")


def _require(package: str, why: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        install = f"{sys.executable} -m pip install -r requirements-{extra}.txt"
        raise ConfigError(f"{why}, which is not installed: {install}")


async def run_at_once(
    address: str, prompts: Sequence[str], workload: WorkloadConfig, contender: Contender, *, concurrency: int
) -> list[RequestRecord]:
    """Complete prompts at HOST:PORT with `concurrency` users at once, each prompt at least once.

    Raises:
        UnavailableError: a user could not connect, or Locust failed.
    """
    num_requests = max(len(prompts), REQUESTS_PER_USER * concurrency)
    plan = LoadPlan(
        address=address,
        requests=tuple((i % len(prompts), prompts[i % len(prompts)]) for i in range(num_requests)),
        max_new_tokens=workload.max_new_tokens,
        temperature=workload.temperature,
        seed=workload.seed,
        gamma=contender.gamma or 0,  # as in `client`
        schedule=contender.schedule.value if contender.schedule else None,
        deadline_s=workload.deadline_s,
        ignore_eos=workload.ignore_eos,
    )
    with tempfile.TemporaryDirectory(prefix="specdec-load-") as directory:
        results = await _run_locust(plan, Path(directory), concurrency)
    if results["errors"]:
        first = results["errors"][0]
        raise UnavailableError(f"{len(results['errors'])} users could not connect: {first}", address=address)
    return [record_from_json(fields) for fields in results["records"]]


async def _run_locust(plan: LoadPlan, directory: Path, concurrency: int) -> dict[str, Any]:
    plan_file, results_file, log_file = (directory / name for name in ("plan.json", "results.json", "locust.log"))
    plan_file.write_text(json.dumps(asdict(plan)))
    flags = ["--users", str(concurrency), "--spawn-rate", str(concurrency), "--headless", "--only-summary"]
    files = ["--plan", str(plan_file), "--results", str(results_file)]
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "locust", "-f", str(LOCUST_FILE), *flags, *files,
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=asyncio.subprocess.STDOUT, env=_environment(),
        )  # fmt: skip
        try:
            async with asyncio.timeout(_limit_s(plan, concurrency)):
                await process.wait()
        except TimeoutError:
            raise UnavailableError(f"Locust has not ended after {_limit_s(plan, concurrency):g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if not results_file.is_file():
        raise UnavailableError(f"Locust ended with exit code {process.returncode}:\n{log_file.read_text()[-2000:]}")
    results: dict[str, Any] = json.loads(results_file.read_text())
    return results


def _limit_s(plan: LoadPlan, concurrency: int) -> float:
    """Time after which Locust itself must be at fault: every request has its own deadline."""
    return START_S + plan.deadline_s * math.ceil(len(plan.requests) / concurrency)


def _environment() -> dict[str, str]:
    """Ours, so that the user finds grpc_comm."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
