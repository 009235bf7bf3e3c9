"""Load generators: clients that wait for their answers (closed loop), or arrivals at a rate (open loop).

Locust runs many clients as gRPC users on gevent, in its own process. gevent in a process with asyncio or torch would
stall both, so nothing of Locust is imported here: requests go out in one JSON file, and answers come back in another.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from specdec.comparison.plan.config import ComparisonConfig
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.run.client import Ask
from specdec.comparison.run.grpc_client import record_of
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.errors import ConfigError, MissingPackageError, UnavailableError
from specdec.inference.workers.calls.convert import completion_to_message, event_from_message
from specdec.inference.workers.completion import CompletionRequest

LOCUST_FILE = Path(__file__).with_name("locust_user.py")
REQUESTS_PER_CLIENT = 2
_PIP = f"{sys.executable} -m pip install"
PAUSE_S = 0.1
"""Seconds that a client waits after a failed request, before it sends the next one; see `patient`."""
START_S = 30.0
"""Seconds that Locust, a load generator in its own process, may take to start and connect."""


def num_requests(count: int, concurrency: int) -> int:
    """Return the number of requests of a closed loop with `count` prompts and `concurrency` clients.

    There is one request per prompt, or `REQUESTS_PER_CLIENT` per client if the prompts are too few to keep all busy.
    """
    return count if concurrency == 1 else max(count, REQUESTS_PER_CLIENT * concurrency)


async def closed_loop(ask: Ask, count: int, concurrency: int) -> list[RequestRecord]:
    """Send `count` prompts in turn, with always `concurrency` requests in flight; return the records of all requests.

    Each prompt is sent once, or more often if the prompts are too few to keep all clients busy (`num_requests`).
    """
    return await _in_turn(ask, count, concurrency, iter(range(num_requests(count, concurrency))))


async def _in_turn(ask: Ask, count: int, concurrency: int, numbers: Iterator[int]) -> list[RequestRecord]:
    """Send the prompts with these numbers, modulo `count`, with always `concurrency` requests in flight.

    Return the records of all requests.
    """

    async def client() -> list[RequestRecord]:
        return [record for number in numbers for record in await ask(number % count, None)]

    return list(itertools.chain(*await asyncio.gather(*(client() for _ in range(concurrency)))))


async def for_seconds(ask: Ask, count: int, streams: int, seconds: float) -> list[RequestRecord]:
    """Keep `streams` requests in flight for 1.5 times `seconds`, then wait for the last answers.

    Returns:
        The records of requests that end after the first third, in which the load becomes steady.
    """
    ends_s = time.monotonic() + 1.5 * seconds
    numbers = itertools.takewhile(lambda _: time.monotonic() < ends_s, itertools.count())
    records = await _in_turn(patient(ask), count, streams, numbers)
    return [record for record in records if record.ended_s >= ends_s - seconds]


def patient(ask: Ask) -> Ask:
    """Return a function that does as `ask`, but pauses after each failure.

    Without the pause a server that refuses requests, since it is busy, would get ever more of them.
    """

    async def asked(prompt_index: int, sent_s: float | None) -> list[RequestRecord]:
        records = await ask(prompt_index, sent_s)
        if any(record.error_code is not None for record in records):
            await asyncio.sleep(PAUSE_S)
        return records

    return asked


async def steady(
    ask: Ask, count: int, streams: int, limit_s: float, *, wanted: int | None = None
) -> list[RequestRecord]:
    """Keep `streams` requests in flight, with `count` prompts in turn; return the first answers within `limit_s`.

    Args:
        limit_s: seconds after which the load ends even if answers are missing.
        wanted: number of answers after which the load ends (default: the larger of `count` and `streams`). They are
            those of the first requests; later requests only keep up the load, and are cancelled.
    """
    numbers, records = itertools.count(), list[RequestRecord]()
    wanted = max(count, streams) if wanted is None else wanted
    is_done, asked = asyncio.Event(), patient(ask)

    async def stream() -> None:
        for number in numbers:
            answers = await asked(number % count, None)
            records.extend(answers if number < wanted else ())
            if len(records) >= wanted:
                is_done.set()

    async def until_done() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(is_done.wait(), limit_s)
        for task in tasks:
            task.cancel()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream()) for _ in range(streams)]
        group.create_task(until_done())
    return records


async def as_they_come(ask: Ask, count: int, arrivals_s: Sequence[float]) -> list[RequestRecord]:
    """Send `count` prompts in turn at given times, without waiting for answers; return the records of all requests.

    A request's times count from the time at which it was due. So every request that a delay makes late shows this delay
    ("coordinated omission" is avoided).

    Args:
        arrivals_s: time of each request, in seconds from now.
    """
    began = time.monotonic()

    async def ask_at(number: int, due_s: float) -> list[RequestRecord]:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        return await ask(number % count, due_s)

    asked = (ask_at(number, began + arrival_s) for number, arrival_s in enumerate(arrivals_s))
    return list(itertools.chain(*await asyncio.gather(*asked)))


def poisson_arrivals(request_rate: float, count: int, seed: Sequence[int]) -> list[float]:
    """Return the times, in seconds, of `count` independent arrivals, on average `request_rate` per second."""
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, count)
    return [float(at) for at in np.cumsum(gaps)]


def require_clients(config: ComparisonConfig) -> None:
    """Raise ConfigError if a package is missing that the load, the endpoints or the servers of a comparison need."""
    if config.servers and _is_missing("transformers"):
        raise MissingPackageError("a comparison that starts servers", "transformers")
    if config.uses_locust and _is_missing("locust"):
        raise ConfigError(f"concurrency above 1 is driven by Locust, which is not installed: {_PIP} locust gevent")
    if not all(endpoint.is_grpc for endpoint in config.endpoints) and _is_missing("aiohttp"):
        raise ConfigError(f"HTTP endpoints need aiohttp, which is not installed: {_PIP} aiohttp")


def _is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


async def by_locust(
    address: str, requests: Sequence[CompletionRequest], *, concurrency: int, deadline_s: float
) -> tuple[list[RequestRecord], float]:
    """Run a closed loop of Locust users at `address` (HOST:PORT), with one of these requests for each prompt.

    Returns:
        The records, and CPU time over wall time of Locust from its first request on.

    Raises:
        UnavailableError: a user could not connect, or Locust failed.
    """
    count = len(requests)
    messages = [b64encode(completion_to_message(request).SerializeToString()).decode() for request in requests]
    asked = [(i % count, messages[i % count]) for i in range(num_requests(count, concurrency))]
    plan = {"address": address, "deadline_s": deadline_s, "requests": asked}
    limit_s = START_S + deadline_s * math.ceil(len(asked) / concurrency)  # every request has its own deadline
    with tempfile.TemporaryDirectory(prefix="specdec-load-") as directory:
        results = await _run_locust(plan, Path(directory), concurrency, limit_s)
    if results["errors"]:
        first = results["errors"][0]
        raise UnavailableError(f"{len(results['errors'])} users could not connect: {first}", address=address)
    return [record_of_messages(**fields) for fields in results["records"]], results["client_share"]


def record_of_messages(
    prompt_index: int, sent_s: float, messages: Sequence[tuple[float, str]], error: tuple[str, str, float] | None
) -> RequestRecord:
    """Return the record of a request that Locust sent.

    Args:
        sent_s: monotonic seconds of its sending.
        messages: for each message of the answer the seconds since the request was sent, and its bytes in base64.
        error: gRPC status, details, and seconds until the failure; None if the request was answered.
    """
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
    """Return this process's environment, with a PYTHONPATH by which Locust finds the same packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
