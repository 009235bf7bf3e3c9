"""The engine through which a pool of draft workers serves `vllm serve`: drafts, reports of passes, lost connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from specdec.inference.commit import Commit, FinishReason, Opened, TokenEvent
from specdec.inference.errors import NotFoundError
from specdec.inference.request import GenerationRequest, Schedule
from specdec.inference.speculation.tree import Branch
from specdec.inference.vllm.frames import FrameError, Has, Passed, Row, Wanted
from specdec.inference.vllm.lending import LendingEngine
from specdec.inference.vllm.session import VllmSession
from tests.support.engine_contract import LENGTH, PROMPT, DraftContract, completed, wanted
from tests.support.scripted_core import ClientsOfCore, ScriptedCore

METRICS: Any = SimpleNamespace(request=lambda: SimpleNamespace(take=lambda event: None))


class NoWorkers:
    """Stand-in for a pool without draft workers, which reads no answers, so that the test can read them."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        if request is None:
            yield Opened(0)


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
async def lending(core: ScriptedCore) -> ClientsOfCore:
    engine = ClientsOfCore(core)
    engine.lend(NoWorkers(), METRICS)  # type: ignore[arg-type]
    return engine


class TestLendingEngine(DraftContract):
    END = None  # vLLM knows why an output ends, and answers

    @pytest.fixture
    def engine(self, lending: ClientsOfCore) -> ClientsOfCore:
        return lending


async def test_a_report_that_comes_twice_counts_once(core: ScriptedCore, lending: ClientsOfCore) -> None:
    """A report of a pass whose tokens are known already changes nothing.

    This happens if a new connection of an engine core has named the request with its tokens before.
    """
    session = lending.open(wanted())
    tokens: list[int] = []
    async for event in lending.answer(session):
        if isinstance(event, Commit):
            tokens += event.token_ids
            lending.receive(0, core.reports[-1])
    assert len(tokens) == LENGTH
    assert tokens == (await completed(lending, wanted()))[0]


@pytest.mark.parametrize("fault", [{"position": len(PROMPT) + 1}, {"num_tokens": 2}])
async def test_a_report_that_lacks_tokens_ends_the_link(lending: ClientsOfCore, fault: dict[str, int]) -> None:
    session = lending.open(wanted())
    row = Row(session.id, len(PROMPT), 1, token_ids=[5])
    with pytest.raises(FrameError, match="lacks tokens before"):
        lending.receive(0, Passed(1, 0, 1, [structs.replace(row, **fault)]))


async def test_a_lost_link_ends_the_sessions_of_its_core_alone(lending: ClientsOfCore) -> None:
    here, there = lending.open(wanted()), lending.open(wanted())
    there.core = 1
    lending.receive(1, None)
    assert [event async for event in lending.answer(there)] == [Opened(0)]
    assert lending.num_running == 1
    assert sum([len(e.token_ids) async for e in lending.answer(here) if isinstance(e, Commit)]) == LENGTH


async def test_a_request_with_values_out_of_range_ends_the_link(lending: ClientsOfCore) -> None:
    for sampling in ({"temperature": -1.0}, {"no_parameter": 1}):
        with pytest.raises(FrameError, match="request odd cannot be"):
            lending.receive(0, Has("odd", Wanted([1, 2], 1, 5, 8, sampling)))


async def test_a_request_of_a_client_is_sent_to_vllm(lending: ClientsOfCore) -> None:
    with pytest.raises(NotFoundError, match="vLLM's own server answers"):
        LendingEngine.open(lending, wanted())


def output(token_ids: list[int], reason: str | None = None) -> Any:
    return SimpleNamespace(token_ids=token_ids, finish_reason=reason, logprobs=None)


def test_an_output_of_several_passes_has_one_commit_for_each() -> None:
    """VLLM joins outputs of passes that a slow reader has not read yet; there is one commit per pass all the same."""
    session = VllmSession(wanted())
    session.follow(is_helped=True)
    start = len(PROMPT)
    session.propose([Branch(None, start, [7, 8, 9])])
    session.report(Row(session.id, start, 3, 3, 2, help=1, num_received=3, hold_us=5, rejected=[9]), 100)
    session.report(Row(session.id, start + 3, 1), 50)
    session.report(Row(session.id, start + 4, 2, 2, 1, is_lookup=True), 70)
    commits = [*session.commits(output([7, 8, 1, 2])), *session.commits(output([3, 4], "length"))]
    assert [commit.token_ids for commit in commits] == [(7, 8, 1), (2,), (3, 4)]
    assert [commit.position for commit in commits] == [start, start + 3, start + 4]
    assert [commit.num_accepted_tokens for commit in commits] == [2, 0, 1]
    assert [commit.own.num_tokens for commit in commits] == [0, 0, 2]
    assert [commit.timings.compute_us for commit in commits] == [100, 50, 70]
    assert [commit.num_received_tokens for commit in commits] == [3, 0, 0]
    assert [commit.finish_reason for commit in commits] == [None, None, FinishReason.LENGTH]


async def test_messages_before_the_core_has_the_request_wait_for_it(lending: ClientsOfCore) -> None:
    session = VllmSession(wanted())
    lending.begin_help(session, Schedule.ASYNC)
    lending.propose(session, [Branch(None, len(PROMPT), [1])])
    assert len(session.early) == 2
    lending.end_help(session)
    assert len(session.early) == 1, "tokens of a worker that is gone are not sent"
