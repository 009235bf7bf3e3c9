"""How requests come: from so many clients that wait for their answers, or on their own at a rate (an open loop).

Many clients are Locust with a gRPC user on gevent, in a process of its own. gevent in a process with asyncio or torch
would stall both, so nothing of Locust is imported here: messages go out in one JSON file, and come back in another.
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
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comparison.plan.config import ComparisonConfig
from comparison.run.client import Ask
from comparison.run.grpc_client import record_of
from comparison.run.record import RequestRecord
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from inference.config import ROOT
from inference.errors import ConfigError, UnavailableError
from inference.workers.completion import CompletionRequest
from inference.workers.convert import completion_to_message, event_from_message

LOCUST_FILE = Path(__file__).with_name("locust_user.py")
REQUESTS_PER_CLIENT = 2
START_S = 30.0
"""For Locust to start and connect."""


def num_requests(count: int, concurrency: int) -> int:
    """Each prompt once, and of many clients each keeps busy."""
    return count if concurrency == 1 else max(count, REQUESTS_PER_CLIENT * concurrency)


async def closed_loop(ask: Ask, count: int, concurrency: int) -> list[RequestRecord]:
    """Ask for `count` prompts, which take turns, and always for so many at once."""
    waiting = iter(range(num_requests(count, concurrency)))

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


def require_clients(config: ComparisonConfig) -> None:
    """Refuse loads and endpoints whose extra is missing.

    Raises:
        ConfigError: a package is not installed; the message says how to install it.
    """
    if config.uses_locust:
        _require("locust", "concurrency above 1 is driven by Locust", "loadtest")
    if not all(endpoint.is_grpc for endpoint in config.endpoints):
        for package in ("httpx", "httpx_sse"):
            _require(package, f"an endpoint of HTTP is asked with {package}", "endpoints")


def _require(package: str, why: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        install = f"{sys.executable} -m pip install -r requirements-{extra}.txt"
        raise ConfigError(f"{why}, which is not installed: {install}")


async def by_locust(
    address: str, requests: Sequence[CompletionRequest], *, concurrency: int, deadline_s: float
) -> list[RequestRecord]:
    """A closed loop of Locust users at HOST:PORT, with one of these requests for each prompt.

    Raises:
        UnavailableError: a user could not connect, or Locust failed.
    """
    count = len(requests)
    messages = [b64encode(completion_to_message(request).SerializeToString()).decode() for request in requests]
    asked = [(i % count, messages[i % count]) for i in range(num_requests(count, concurrency))]
    plan = {"address": address, "deadline_s": deadline_s, "requests": asked}
    limit_s = START_S + deadline_s * math.ceil(len(asked) / concurrency)  # every request has a deadline of its own
    with tempfile.TemporaryDirectory(prefix="specdec-load-") as directory:
        results = await _run_locust(plan, Path(directory), concurrency, limit_s)
    if results["errors"]:
        first = results["errors"][0]
        raise UnavailableError(f"{len(results['errors'])} users could not connect: {first}", address=address)
    return [record_of_messages(**fields) for fields in results["records"]]


def record_of_messages(
    prompt_index: int, sent_s: float, messages: Sequence[tuple[float, str]], error: tuple[str, str, float] | None
) -> RequestRecord:
    """Of a request as a user writes it: (seconds since sent, message in base64); `error`: status, words, seconds."""
    if error is not None:
        return RequestRecord(prompt_index, sent_s, 0, (), (), *error[:2], failed_s=error[2])
    parsed = ((arrived_s, pb.GenerateResponse.FromString(b64decode(text))) for arrived_s, text in messages)
    return record_of([(arrived_s, event_from_message(message)) for arrived_s, message in parsed], prompt_index, sent_s)


async def _run_locust(plan: dict[str, Any], directory: Path, concurrency: int, limit_s: float) -> dict[str, Any]:
    plan_file, results_file, log_file = (directory / name for name in ("plan.json", "results.json", "locust.log"))
    plan_file.write_text(json.dumps(plan))
    flags = ["--users", str(concurrency), "--spawn-rate", str(concurrency), "--headless", "--only-summary"]
    files = ["--plan", str(plan_file), "--results", str(results_file)]
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "locust", "-f", str(LOCUST_FILE), *flags, *files,
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=asyncio.subprocess.STDOUT, env=_environment(),
        )  # fmt: skip
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            raise UnavailableError(f"Locust has not ended after {limit_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if not results_file.is_file():
        raise UnavailableError(f"Locust ended with exit code {process.returncode}:\n{log_file.read_text()[-2000:]}")
    results: dict[str, Any] = json.loads(results_file.read_text())
    return results


def _environment() -> dict[str, str]:
    """Ours, so that the user finds grpc_comm."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
