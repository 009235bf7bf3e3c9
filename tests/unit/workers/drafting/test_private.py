"""A draft worker in its client's process, on the connection of the client's requests; its drafts change no token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from specdec.inference.caller import ANYBODY, NamesRequests, request_context
from specdec.inference.commit import Delta
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import TargetEngine
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.request import GenerationRequest, Noise, Schedule
from specdec.inference.serving.assembly import running
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.reading import Reader
from specdec.inference.workers.completion import CompletionRequest
from specdec.inference.workers.drafting import private
from specdec.inference.workers.drafting.service import VerificationServicer
from tests.support.completers import CARD
from tests.support.edges import WORDS, Edge, edge
from tests.support.models import tiny_tokenizer
from tests.support.ports import listening
from tests.support.scripted import VOCAB_SIZE, ScriptedDecoder, tokens_at, until

REQUEST = CompletionRequest((1, 2, 3), seed=1, max_new_tokens=34, ignore_eos=True)


class SlowDecoder(ScriptedDecoder):
    """Decoder that takes 5 ms per pass, so that draft tokens can arrive meanwhile."""

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        time.sleep(0.005)
        return super().step(turns)


class Shorter:
    """Reader that reads a prompt without its last token."""

    def __init__(self, reader: Reader) -> None:
        self.defaults, self.vocab_size, self._read = reader.defaults, reader.vocab_size, reader.read

    async def read(self, request: CompletionRequest) -> GenerationRequest:
        generation = await self._read(request)
        return replace(generation, prompt_token_ids=generation.prompt_token_ids[:-1])


@asynccontextmanager
async def attached(
    schedule: Schedule = Schedule.ASYNC,
    *,
    words: Vocabulary = WORDS,
    max_waiting: int = 4,
    noise: Noise = Noise.SPECDEC,
) -> AsyncGenerator[Edge, None]:
    """Yield a client with a draft worker, at a target with this vocabulary and rule for random numbers (noise)."""
    async with running(TargetEngine(SlowDecoder(num_slots=4))) as engine:
        pool = DraftPool(engine)
        generation = GenerationServicer(LocalCompleter(pool, Tokenizer(tiny_tokenizer(), frozenset())), CARD)
        async with (
            listening(generation, VerificationServicer(pool, words, noise=noise)) as server,
            edge(server.port, schedule, max_waiting=max_waiting) as client,
        ):
            yield client


async def answered(client: Edge, request: CompletionRequest = REQUEST) -> list[Delta]:
    """Complete a request, and assert that its tokens are the target's; return its deltas."""
    async with asyncio.timeout(60):
        deltas = [event async for event in client.completer.complete(request) if isinstance(event, Delta)]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == tokens_at(3, 34)
    return deltas


def num_accepted(deltas: list[Delta]) -> int:
    return sum(delta.num_accepted_tokens for delta in deltas)


@pytest.mark.parametrize("schedule", Schedule)
async def test_a_request_is_drafted_for_and_its_cost_is_known(schedule: Schedule) -> None:
    async with attached(schedule) as each:
        deltas = await answered(each)
        assert num_accepted(deltas) > 0
        assert sum(delta.counts.bytes_up for delta in deltas) > 0
        assert sum(delta.counts.bytes_down for delta in deltas) > 0
        assert (sum(delta.timings.draft_us for delta in deltas) > 0) == (schedule is Schedule.SYNC)
        assert num_accepted(await answered(each, replace(REQUEST, seed=None, gamma=2))) > 0
        assert num_accepted(await answered(each, replace(REQUEST, gamma=0))) == 0
        assert each.worker.num_undrafted == 0


@pytest.mark.parametrize("noise", Noise)
async def test_a_worker_draws_by_the_targets_noise(noise: Noise) -> None:
    async with attached(noise=noise) as each:
        await answered(each)
        assert {draft.sampling.noise for step in each.proposer.steps for draft in step} == {noise}


@pytest.mark.parametrize("schedule", Schedule)
async def test_requests_beyond_the_drafts_slots_go_on_alone(schedule: Schedule) -> None:
    """Requests for which the draft has no slot decode without draft tokens, at once.

    Regression: the target waited a minute for draft tokens for such requests.
    """
    async with attached(schedule, max_waiting=0) as each:
        answers = await asyncio.gather(*(answered(each) for _ in range(4)))
        assert sum(num_accepted(deltas) > 0 for deltas in answers) >= 2


@pytest.mark.parametrize("schedule", Schedule)
async def test_a_request_survives_its_draft(schedule: Schedule) -> None:
    """If a draft's model fails, the request goes on without draft tokens.

    Regression: in rounds, the target waited a minute for draft tokens after the draft's model had failed.
    """
    async with attached(schedule) as each:
        each.proposer.gate.fail(RuntimeError("out of luck"), times=8)
        await answered(each)


async def test_a_target_that_refuses_the_worker_still_answers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "ATTACH_S", 0.1)
    async with attached(words=Vocabulary("another", VOCAB_SIZE)) as each:
        await until(lambda: "go on without drafts" in caplog.text)
        assert num_accepted(await answered(each)) == 0
        assert each.worker.num_undrafted == 1


async def test_a_draft_that_reads_another_prompt_is_given_up_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a draft reads a prompt as fewer tokens than the target, the request goes on alone, with one line in the log.

    Regression: each later pass wrote the line again, and declined the session again.
    """
    async with attached() as each:
        monkeypatch.setattr(each.worker, "reader", Shorter(each.worker.reader))
        assert num_accepted(await answered(each)) == 0
    assert (caplog.text.count("gets no draft"), each.worker.num_undrafted) == (1, 1)


async def test_a_stream_does_not_belong_to_the_request_that_found_its_target(caplog: pytest.LogCaptureFixture) -> None:
    """The log lines and calls of a worker's stream to a target have no request's id, even if a request opened it.

    Regression: a request opened the stream to a target that had just joined, and every log line of the stream had that
    request's id for as long as the process ran.
    """
    caplog.handler.addFilter(NamesRequests())
    caplog.set_level(logging.INFO, "specdec.inference.workers.drafting.stream")
    async with attached() as each:
        for replica, (_, task) in [*each.worker._streams.items()]:  # as if the target had not been there before
            task.cancel()
            del each.worker._streams[replica]
        with request_context(ANYBODY, "mine"):
            await answered(each)
        await until(lambda: caplog.text.count("attached as") == 2)
    assert {record.request for record in caplog.records if "attached as" in record.message} == {""}  # type: ignore[attr-defined]
