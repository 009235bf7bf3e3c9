"""Load generators of comparisons: when requests are sent and counted, and what Locust's process imports and returns."""

from __future__ import annotations

import ast
import asyncio
import json
import time
from base64 import b64encode

import numpy as np
import pytest

from specdec.comparison.plan.config import ALONE
from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.plan.record import RequestRecord, Round
from specdec.comparison.run.load import (
    LOCUST_FILE,
    PAUSE_S,
    as_they_come,
    closed_loop,
    for_seconds,
    poisson_arrivals,
    record_of_messages,
    steady,
)
from specdec.inference.commit import Delta, Started, TextEvent, Timings
from specdec.inference.request import Provenance
from specdec.inference.workers.calls.convert import event_to_message


def test_locust_processes_import_neither_torch_nor_asyncio() -> None:
    tree = ast.parse(LOCUST_FILE.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith(("torch", "specdec.inference", "asyncio", "grpc.aio"))]
    assert "grpc.experimental.gevent" in names


def test_messages_survive_json() -> None:
    timings = Timings(compute_us=9)
    told: tuple[TextEvent, ...] = (
        Started(4, 7, provenance=Provenance("model")),
        Delta(4, (1, 2), 3, 1, timings, text="ab"),
    )
    written = [(float(at), b64encode(event_to_message(it).SerializeToString()).decode()) for at, it in enumerate(told)]
    read = record_of_messages(2, 5.0, json.loads(json.dumps(written)), None)
    assert (read.prompt_index, read.sent_s, read.num_prompt_tokens, read.model_id) == (2, 5.0, 4, "model")
    assert (read.token_ids, read.text) == ((1, 2), "ab")
    assert read.rounds == (Round(1.0, 2, 3, 1, timings),)
    failed = record_of_messages(2, 5.0, [], ("INTERNAL", "why", 3.0))
    assert (failed.error_code, failed.error_message, failed.failed_s) == ("INTERNAL", "why", 3.0)
    for cut in ([], written[1:]):
        assert record_of_messages(2, 5.0, cut, None).error_code == "INTERNAL"


async def _held_up(prompt_index: int, due_s: float | None) -> list[RequestRecord]:
    """Return, in a list, the record of a request to a simulated server that answers one at a time, in 50 ms each.

    Its time counts from `due_s`, or from the call if that is None.
    """
    due_s = time.monotonic() if due_s is None else due_s
    async with ONE_AT_A_TIME:
        await asyncio.sleep(0.05)
    done = Round(time.monotonic() - due_s, 1, 0, 0, Timings())
    return [RequestRecord(prompt_index, due_s, 1, (1,), (done,))]


ONE_AT_A_TIME = asyncio.Lock()


async def test_requests_of_an_open_loop_do_not_wait_for_answers() -> None:
    """In an open loop, which sends at a rate, each request's time counts from when it is due, answers or not.

    If the client waited for answers, a slow server would get fewer requests, and its queue would not be seen.
    """
    asyncio.get_running_loop().call_later(0.01, time.sleep, 0.05)
    records = await as_they_come(_held_up, 3, [*[0.0] * 5, 0.02])
    assert [record.prompt_index for record in records] == [0, 1, 2, 0, 1, 2]
    first_s = records[0].sent_s
    assert [record.sent_s - first_s for record in records] == pytest.approx([*[0.0] * 5, 0.02])
    ends = sorted(record.stats.end_to_end_s for record in records)
    assert ends[-1] >= (6 * 0.05 - 0.02) * 0.9


async def test_one_client_waits_for_the_answer() -> None:
    first, second = await closed_loop(_held_up, 2, 1)
    assert second.sent_s >= first.sent_s + first.stats.end_to_end_s
    assert second.stats.end_to_end_s >= 0.05 * 0.9


def test_arrivals_are_poisson_and_repeat() -> None:
    times = np.array(poisson_arrivals(5.0, 4000, (7, 0)))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)  # of an exponential, both are the same
    assert poisson_arrivals(5.0, 9, (7, 0)) == list(times[:9])
    assert poisson_arrivals(5.0, 9, (7, 1)) != list(times[:9])


@pytest.mark.parametrize(("count", "streams"), [(3, 1), (3, 3), (2, 5)])
async def test_steady_load_never_falls(count: int, streams: int) -> None:
    """A steady load has `streams` requests in flight until each of `count` prompts and each stream has an answer."""
    in_flight, least, asked = 0, 99, list[int]()

    async def ask(prompt_index: int, sent_s: float | None) -> list[RequestRecord]:
        nonlocal in_flight, least
        number, in_flight = len(asked), in_flight + 1
        asked.append(prompt_index)
        try:
            await asyncio.sleep(0.001 * (1 + number % 7))
            least = min(least, in_flight)
        finally:
            in_flight -= 1
        return [RequestRecord(prompt_index, 0.0, number, (), ())]

    records = await steady(ask, count, streams, limit_s=30.0)
    assert sorted(record.num_prompt_tokens for record in records) == list(range(max(count, streams)))
    assert (in_flight, least) == (0, streams)
    assert {record.prompt_index for record in records} == set(range(count))


async def test_answers_of_the_first_third_do_not_count() -> None:
    """A run of a fixed time leaves out answers that end in its first third, and includes those in flight at its end."""
    began = time.monotonic()

    async def ask(prompt_index: int, sent_s: float | None) -> list[RequestRecord]:
        sent_s = time.monotonic()
        await asyncio.sleep(0.03)
        return [RequestRecord(prompt_index, sent_s, 1, (), (), failed_s=time.monotonic() - sent_s)]

    records = await for_seconds(ask, 2, 3, 0.2)
    assert {record.prompt_index for record in records} == {0, 1}
    assert min(record.ended_s for record in records) >= began + 0.1
    assert max(record.sent_s for record in records) <= began + 0.3 < max(record.ended_s for record in records)


def test_a_run_of_a_fixed_time_counts_the_tokens_of_that_time() -> None:
    """A run of a fixed time counts the tokens that arrived within it, not whole answers.

    Regression: it counted whole answers, so if 64 streams ended at once, it had 64 answers too many or too few.
    """
    rounds = [Round(at, 8, 0, 0, Timings()) for at in (1.0, 2.0, 3.0)]
    record = RequestRecord(0, 5.0, 1, tuple(range(24)), tuple(rounds))
    assert Sample(Cell(ALONE, "kind", 0.0, 4), 0, (record,), window=(6.5, 8.0)).tokens_per_s == 8 / 1.5


async def test_a_server_that_refuses_is_asked_again_after_a_pause() -> None:
    """After a failure, a client of a fixed-time run waits, so that refusals are not counted by the thousand."""
    num_asked = 0

    async def ask(prompt_index: int, sent_s: float | None) -> list[RequestRecord]:
        nonlocal num_asked
        num_asked += 1
        return [RequestRecord(prompt_index, 0.0, 1, (), (), error_code="RESOURCE_EXHAUSTED")]

    await for_seconds(ask, 2, 3, 0.2)
    assert 3 <= num_asked <= 3 * (1 + round(0.3 / PAUSE_S))


async def test_steady_load_ends_in_time() -> None:
    """A steady load ends at its time limit: unanswered requests are cancelled, and have no record."""

    async def ask(prompt_index: int, sent_s: float | None) -> list[RequestRecord]:
        await asyncio.sleep(3600)
        return []

    assert await steady(ask, 2, 4, limit_s=0.01) == []


async def test_errors_of_a_steady_load_are_not_swallowed() -> None:
    async def ask(prompt_index: int, sent_s: float | None) -> list[RequestRecord]:
        raise KeyError("a fault of this program")

    with pytest.raises(ExceptionGroup):
        await steady(ask, 2, 4, limit_s=30.0)
