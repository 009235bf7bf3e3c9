"""A client that knows several servers: which of them gets a request, and which one goes on if that one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from specdec.grpc_comm.server import Server
from specdec.inference.commit import Delta, Finished, FinishReason, Started, TextEvent
from specdec.inference.config import ConnectionConfig
from specdec.inference.errors import (
    CapacityError,
    IncompatibleDraftError,
    InternalError,
    OtherServerError,
    SpecDecError,
    UnauthenticatedError,
    UnavailableError,
)
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import UNKNOWN, Provenance
from specdec.inference.scheduling import retry_budget
from specdec.inference.scheduling.retry_budget import SIZE
from specdec.inference.workers.calls.fleet import Fleet
from specdec.inference.workers.calls.status import to_status
from specdec.inference.workers.completing import resuming
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.resuming import MAX_BARREN_RESUMES
from specdec.inference.workers.completion import CompletionRequest
from tests.support.completers import CARD

NUM_TOKENS = 6
REQUEST = CompletionRequest("x", max_new_tokens=NUM_TOKENS)
ORIGIN = Provenance("m", "", "d")
PATIENCE_S = 20.0


class Counting:
    """Completer whose tokens are 0, 1, 2, ...; after each token it waits until the event `go` is set."""

    def __init__(
        self,
        *,
        origin: Provenance = ORIGIN,
        resumes: bool = True,
        refusal: SpecDecError | None = None,
        serves: bool = True,
    ) -> None:
        self.origin = origin
        self.resumes = resumes
        self.refusal = refusal
        self.refuses_late = False
        self.serves = serves  # or its server is of another kind, which has no such method
        self.asked: list[CompletionRequest] = []
        self.go = asyncio.Event()
        self.go.set()

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        self.asked.append(request)
        if self.refusal is not None:
            if self.refuses_late:
                yield Started(3, 7, provenance=self.origin)
                yield Delta(3, ())
            raise self.refusal
        first = len(request.resume.token_ids) if request.resume is not None and self.resumes else 0
        yield Started(3, 7, provenance=self.origin)
        for token_id in range(first, NUM_TOKENS):
            is_last = token_id == NUM_TOKENS - 1
            reason = FinishReason.LENGTH if is_last else None
            yield Delta(3 + token_id, (token_id,), text=str(token_id), piece_lengths=(1,), finish_reason=reason)
            await self.go.wait()
        yield Finished(FinishReason.LENGTH)


class Place:
    """A gRPC server over a completer, which a test can kill and start again on the same port."""

    def __init__(self, completer: Any, host: str = "127.0.0.1", port: int = 0) -> None:
        self.completer = completer
        self._host = host
        self.server = self._made(f"{host}:{port}")

    def _made(self, address: str) -> Server:
        servicers = [GenerationServicer(self.completer, CARD)] if getattr(self.completer, "serves", True) else []
        return Server(address, servicers, status_of=to_status)

    @property
    def address(self) -> str:
        return f"{self._host}:{self.server.port}"

    async def die(self) -> None:
        await self.server._server.stop(0)

    async def rise(self) -> None:
        self.server = self._made(self.address)
        await self.server.open()


@asynccontextmanager
async def places(
    *completers: Counting | FailoverCompleter, patience_s: float = PATIENCE_S
) -> AsyncGenerator[tuple[FailoverCompleter, list[Place]], None]:
    """Run a server for each completer; yield (a client of all servers that prefers the first one, the servers).

    For `patience_s` the client looks for a server that goes on with an answer.
    """
    found = [Place(completer) for completer in completers]
    async with AsyncExitStack() as stack:
        for place in found:
            await place.server.open()
            stack.push_async_callback(place.die)
        fleet = await stack.enter_async_context(Fleet([place.address for place in found]))
        async with asyncio.timeout(60):
            async for _ in fleet.serves():
                if all(record.ready for record in fleet._policy.records.values()):
                    break
        fleet._policy._nearest = lambda addresses, prefix: addresses[0]  # type: ignore[method-assign]
        connection = ConnectionConfig(found[0].address, 1, reconnect_timeout_s=patience_s)
        yield FailoverCompleter(fleet, connection), found


def text_of(events: Sequence[TextEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


async def answer(completer: FailoverCompleter, request: CompletionRequest = REQUEST) -> str:
    return text_of([event async for event in completer.complete(request)])


async def interrupted(
    completer: FailoverCompleter, place: Place, *, move: bool = False, events: list[TextEvent] | None = None
) -> list[TextEvent]:
    """Return the events of an answer whose server, after the first token, dies or, with `move`, sends clients away.

    If `events` is given, they are added to it, and so are known even if the answer fails.
    """
    place.completer.go.clear()
    events = [] if events is None else events
    async for event in completer.complete(REQUEST):
        events.append(event)
        if len(events) == 2:
            if move:
                place.server.move()
            else:
                await place.die()
    return events


WHOLE = "012345"


async def test_a_server_dies_and_another_goes_on() -> None:
    async with places(Counting(), Counting()) as (completer, (first, second)):
        events = await interrupted(completer, first)
    assert text_of(events) == WHOLE
    assert [type(event) for event in (events[0], events[-1])] == [Started, Finished]
    assert sum(isinstance(event, Started) for event in events) == 1
    (asked,) = second.completer.asked
    assert asked.resume is not None
    assert (asked.resume.token_ids, asked.resume.provenance, asked.seed) == ((0,), ORIGIN, 7)


async def test_a_lost_server_is_named_with_the_time_of_retrying(caplog: pytest.LogCaptureFixture) -> None:
    """A client that has lost its server logs the server's name and how long it will retry.

    Regression: after a target was killed, its client logged one line of gRPC's, and then nothing for half a
    minute.
    """
    caplog.set_level(logging.INFO, "specdec.inference.workers.completing.resuming")
    async with places(Counting(), patience_s=0.3) as (completer, (only,)):
        with pytest.raises(UnavailableError, match=r"; no server went on within 0\.3 s"):
            await interrupted(completer, only)
    (line,) = [record.getMessage() for record in caplog.records if "lost the server" in record.getMessage()]
    assert line.endswith("tried again for up to 0.3 s")
    async with places(Counting(), Counting()) as (completer, (first, _)):
        await interrupted(completer, first)
    assert "goes on at another one" in caplog.text


async def test_a_drain_moves_requests_that_can_move_and_keeps_others() -> None:
    async with places(Counting(), Counting()) as (completer, (first, second)):
        assert text_of(await interrupted(completer, first, move=True)) == WHOLE
        assert len(second.completer.asked) == 1
    async with places(Counting()) as (completer, (only,)):
        only.server.move()
        assert await answer(completer) == WHOLE
        assert len(only.completer.asked) == 1


async def test_no_answer_is_resumed_at_an_older_server() -> None:
    """An answer never goes on at a server of an older version, which would ignore the tokens that the client has.

    Such a server would begin the answer again, and the client would get its first part twice, with code OK.
    """
    old = Counting(origin=UNKNOWN, resumes=False)
    events: list[TextEvent] = []
    async with places(Counting(), old, patience_s=0.1) as (completer, (first, _)):
        with pytest.raises(UnavailableError):
            await interrupted(completer, first, events=events)
    assert text_of(events) == "0"
    assert old.asked


async def test_another_model_does_not_go_on() -> None:
    stranger = Counting(refusal=IncompatibleDraftError("the output began with model_id m"))
    async with places(Counting(), stranger, Counting()) as (completer, (first, *_)):
        assert text_of(await interrupted(completer, first)) == WHOLE


async def test_device_noise_forbids_resumes() -> None:
    async with places(Counting(origin=UNKNOWN), Counting()) as (completer, (first, second)):
        with pytest.raises(UnavailableError, match="no other server can go on"):
            await interrupted(completer, first)
        assert second.completer.asked == []


async def test_a_full_server_passes_a_request_on() -> None:
    full = CapacityError("all 1 slots are busy", retry_after_s=1.0)
    async with places(Counting(refusal=full), Counting()) as (completer, _):
        assert await answer(completer) == WHOLE
    async with places(Counting(refusal=full), Counting(refusal=full)) as (completer, found):
        with pytest.raises(CapacityError, match="slots are busy"):
            await answer(completer)
        assert [len(place.completer.asked) for place in found] == [1, 1]


async def test_full_servers_refuse_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all servers are full, a request is refused soon.

    Regression: refused requests used up the budget of retries, so a refusal came after 30 s, as UNAVAILABLE.
    """
    for module, name, value in (
        (retry_budget, "PER_S", 0.0),
        (resuming, "MAX_REDIAL_S", 0.01),
        (resuming, "REDIAL_S", 0.005),
    ):
        monkeypatch.setattr(module, name, value)
    full = CapacityError("all 1 slots are busy", retry_after_s=1.0)
    async with places(Counting(refusal=full), Counting(refusal=full), patience_s=0.1) as (completer, _):
        for _ in range(2 * SIZE):
            with pytest.raises(CapacityError, match="slots are busy"):
                await answer(completer)
        assert completer._fleet.budget.take(0.0), "something is left for those that have begun"


async def test_requests_that_a_full_server_refuses_are_served_by_another() -> None:
    """Requests that a full server refuses wait for the budget of retries, and then another server answers them."""
    full, room = Counting(refusal=CapacityError("all 1 slots are busy", retry_after_s=1.0)), Counting()
    async with places(full, room) as (completer, _):
        assert await asyncio.gather(*(answer(completer) for _ in range(3 * SIZE))) == [WHOLE] * (3 * SIZE)


@pytest.mark.parametrize("late", [False, True])
async def test_a_breaking_request_reaches_three_servers(late: bool) -> None:
    """A request that makes its servers fail is sent to at most three; an empty message does not count as progress.

    With `late`, each server sends an empty message before it fails.

    Regression: such a request was sent from server to server without an end.
    """
    poison = Counting(refusal=InternalError("the model failed"))
    poison.refuses_late = late
    async with places(poison) as (between, _), places(between) as (completer, _):
        with pytest.raises(InternalError, match="the model failed"):
            await answer(completer)
    assert len(poison.asked) == MAX_BARREN_RESUMES


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"refusal": UnauthenticatedError("the token is not known here")}, UnauthenticatedError),
        ({"serves": False}, OtherServerError),
    ],
    ids=["a revoked token", "another service"],
)
async def test_a_server_that_refuses_all_is_left_out(
    fields: dict[str, Any], error: type[SpecDecError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses every request gets no requests for a time.

    Regression: one of two targets refused at once, so it was the least loaded, and 38 of 40 requests failed.
    """
    monkeypatch.setattr("specdec.inference.scheduling.replicas.FIRST_PAUSE_S", 60.0)  # a busy machine takes a second
    async with places(Counting(**fields), Counting()) as (completer, (refusing, _)):
        assert [await answer(completer) for _ in range(5)] == [WHOLE] * 5
        assert len(refusing.completer.asked) == (0 if "serves" in fields else 3), "ejected, like one that fails"
    async with places(Counting(**fields)) as (completer, _):
        with pytest.raises(error, match=r"the token is not known here|another kind of server"):
            await answer(completer)


async def test_a_new_request_without_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.inference.workers.calls.fleet.LATELY_S", 0.1)
    async with places(Counting()) as (completer, (only,)):
        await only.die()
        async with asyncio.timeout(PATIENCE_S / 2):
            with pytest.raises(UnavailableError):
                await answer(completer)


async def test_a_new_request_waits_for_a_recent_server() -> None:
    """If no server is ready, a new request waits for one that was ready a short time ago.

    Regression: of two restarted servers one was not connected again and one was excluded for its failures, so new
    requests were refused.
    """
    async with places(Counting()) as (completer, (only,)):
        await only.die()
        asking = asyncio.create_task(answer(completer))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await only.rise()
        assert await asking == WHOLE


async def test_each_server_has_its_own_sums() -> None:
    """A gateway counts requests, failures and tokens for each of its servers separately.

    Regression: its figures were sums over all servers, so they did not show which one was slow or
    failed.
    """
    metrics = Metrics("tiny", role="gateway")
    async with places(Counting(), Counting()) as (completer, (first, second)):
        metrics.watch_upstream(lambda: completer._fleet.replicas)
        first.completer.refusal = InternalError("broken")
        assert await answer(completer) == WHOLE
        found = metrics.exposition().decode()
    for name, values in {"requests": (1, 1), "failures": (1, 0), "tokens": (0, NUM_TOKENS)}.items():
        for place, value in zip((first, second), values, strict=True):
            series = f'specdec_upstream_{name}_total{{model_name="tiny",server="{place.address}"}} {float(value)}'
            assert series in found
    assert f'specdec_upstream_seconds_total{{model_name="tiny",server="{second.address}"}}' in found
