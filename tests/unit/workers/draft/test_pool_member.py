"""A worker of the pool and its targets: one of them is not the end of the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from grpc_comm.server import Gate, Server
from grpc_comm.tls import ServerTls
from inference.config import PLAIN, DialSecurity
from inference.errors import HandshakeError, IncompatibleDraftError, InternalError
from inference.text.vocabulary import Vocabulary
from inference.workers.draft import pool_member as module
from inference.workers.draft.pool_member import PoolHelp, PoolMember
from tests.support.certificates import pki

REFUSAL = IncompatibleDraftError("another vocabulary")


def helping(*addresses: str, security: DialSecurity = PLAIN) -> PoolHelp:
    engine: Any = None
    return PoolHelp(engine, addresses, vocabulary=Vocabulary("f", 288), gamma=4, num_slots=4, security=security)


async def test_a_target_that_refuses_does_not_end_the_help_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def run(self: PoolMember) -> None:
        asked.append(self._address)
        if self._address == "a:1":
            raise REFUSAL
        await asyncio.sleep(3600)

    monkeypatch.setattr(PoolMember, "run", run)
    both = helping("a:1", "b:1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(both.refused(), timeout=0.05)
    assert sorted(asked) == ["a:1", "b:1"]
    await both.stop(grace_s=0)
    with pytest.raises(IncompatibleDraftError, match="another vocabulary"):
        await helping("a:1").refused()


async def test_a_target_that_is_not_trusted_is_not_dialled_for_ever(tmp_path: Path) -> None:
    """A handshake that fails reads as UNAVAILABLE: who dials must tell it from a lost link, and say why."""
    ours, theirs = pki(tmp_path / "ours"), pki(tmp_path / "theirs")
    gate = Gate(ServerTls(*theirs.pair("server")).grpc_credentials())
    target = Server("127.0.0.1:0", [], status_of=lambda _: None, gate=gate)
    await target.open()
    help_ = helping(f"127.0.0.1:{target.port}", security=DialSecurity(ours.ca))
    async with asyncio.timeout(20):
        with pytest.raises(HandshakeError, match="unable to get local issuer certificate"):
            await help_.refused()
    await target.close()


async def test_a_link_that_breaks_in_any_way_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story: a frame that could not be parsed was an internal error, and the worker left all of its targets."""
    num_tries = 0

    async def fail(self: PoolMember, stub: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise REFUSAL if num_tries == 3 else InternalError("Failed parsing HTTP/2")

    monkeypatch.setattr(PoolMember, "_help", fail)
    monkeypatch.setattr(module, "REDIAL_S", 0.001)
    with pytest.raises(IncompatibleDraftError):
        await helping("127.0.0.1:1").refused()
    assert num_tries == 3
