"""A request that loses its server: when it goes on at the next one, and when it fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.grpc_comm.guard import Gate
from specdec.grpc_comm.tls import ServerTls
from specdec.inference.commit import Delta, FinishReason, Started, TextEvent
from specdec.inference.config import ConnectionConfig, DialSecurity
from specdec.inference.errors import CapacityError, DeadlineError, HandshakeError, InternalError, UnavailableError
from specdec.inference.request import Provenance
from specdec.inference.scheduling.retry_budget import RetryBudget
from specdec.inference.workers.calls.fleet import Fleet, Replica
from specdec.inference.workers.completing import resuming as module
from specdec.inference.workers.completing.failover import Complete, FailoverCompleter
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest
from tests.support.certificates import pki
from tests.support.ports import listening

REQUEST = CompletionRequest((5, 6), seed=1, max_new_tokens=4)
FULL = CapacityError("all 1 slots are busy", retry_after_s=1.0)
LOST = UnavailableError("the link is gone")
NOBODY = ConnectionConfig("127.0.0.1", 1)


async def generated(
    monkeypatch: pytest.MonkeyPatch,
    *streams: Exception | Delta,
    timeout_s: float = 30.0,
    link: ConnectionConfig = NOBODY,
    drafted: Complete | None = None,
) -> list[int]:
    """Return a client's tokens of one answer from a series of servers.

    Args:
        streams: what each server does: it fails at once with this exception, or sends this delta and is then lost,
            unless the delta ends the answer; after an empty delta it fails with the next item.
        timeout_s: how long the client looks for a server that goes on.
        link: the servers to connect to; by default none answers there.
        drafted: how the client sends a request if it has a draft worker; None if it has none.
    """
    left = list(streams)

    async def stream(self: RemoteCompleter, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        step = left.pop(0)
        if isinstance(step, Exception):
            raise step
        yield Started(2, 1, provenance=Provenance("m", "", "d"))
        yield step
        if step.finish_reason is None:
            raise LOST if step.token_ids else left.pop(0)  # type: ignore[misc]

    monkeypatch.setattr(RemoteCompleter, "complete", stream)
    monkeypatch.setattr(module, "REDIAL_S", 0.001)
    link = replace(link, reconnect_timeout_s=timeout_s)
    async with Fleet(link.targets, link.security) as fleet:
        events = FailoverCompleter(fleet, link, drafted).complete(REQUEST)
        return [token_id async for event in events if isinstance(event, Delta) for token_id in event.token_ids]


async def test_a_slot_that_never_comes_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="slots are busy"):
        await generated(monkeypatch, Delta(2, (7,)), *[FULL] * 500, timeout_s=0.05)


LAST = Delta(3, (8,), finish_reason=FinishReason.LENGTH)
LOSSES: dict[str, list[Exception]] = {
    "its slot is still held by the lost session": [LOST, FULL, FULL],  # the resume failed as any new request
    "a failed pass": [InternalError("the model failed")],  # tokens depend on committed tokens alone
    "a target's own time limit": [DeadlineError("no first message")],  # not the request's deadline
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
async def test_a_request_goes_on_after_a_loss(losses: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    assert await generated(monkeypatch, Delta(2, (7,)), *losses, LAST) == [7, 8]


async def test_a_target_no_longer_trusted_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a target's certificate is not trusted any more, the request fails at once; the target does not count as lost.

    Both are UNAVAILABLE to gRPC; connecting again for 30 s would only hide the reason.
    """
    ours, theirs = pki(tmp_path / "ours"), pki(tmp_path / "theirs")
    gate = Gate(ServerTls(*theirs.pair("server")).grpc_credentials())
    async with listening(gate=gate) as target:
        link = ConnectionConfig("127.0.0.1", target.port, security=DialSecurity(ours.ca))
        with pytest.raises(HandshakeError, match="unable to get local issuer certificate"):
            await generated(monkeypatch, Delta(2, (7,)), LOST, LAST, link=link)
    assert await generated(monkeypatch, Delta(2, (7,)), LOST, LAST, link=link) == [7, 8]  # no server is there: lost


def undrafted(remote: RemoteCompleter, replica: Replica, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
    """Answer as a draft worker in the client's process would if it never sends draft tokens."""
    return remote.complete(request)


async def test_an_edge_waits_for_a_target_that_is_still_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Exception | Delta] = [*[LOST] * 5, Delta(2, (7,)), LAST]
    assert await generated(monkeypatch, *steps, drafted=undrafted) == [7, 8]
    with pytest.raises(UnavailableError, match="link is gone"):
        await generated(monkeypatch, *steps)


async def test_a_spent_budget_means_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that wants to go on waits while the budget of retries is used up.

    All requests of a process share this budget, so that they do not all call a failing target at once.
    """
    turns = iter([False, False, True])
    monkeypatch.setattr(RetryBudget, "take", lambda self, now, spare: next(turns))
    assert await generated(monkeypatch, Delta(2, (7,)), LAST) == [7, 8]
    monkeypatch.setattr(RetryBudget, "take", lambda self, now, spare: False)
    with pytest.raises(UnavailableError, match="link is gone"):
        await generated(monkeypatch, Delta(2, (7,)), LAST, timeout_s=0.05)
