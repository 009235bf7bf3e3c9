"""In every engine, an account without a slot gets one from an account that has several, and no token changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.caller import Caller, request_context
from specdec.inference.commit import Commit, Opened, TokenEvent, TokenSource
from specdec.inference.config import PortSecurity
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.model.decoder import Decoder
from specdec.inference.observe.metrics import Metrics
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, SamplingParams, Schedule
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.drafting.pool_worker import PoolWorker
from specdec.inference.workers.drafting.service import VerificationServicer
from specdec.inference.workers.drafting.stream import Offer
from tests.support.grammars import grammars
from tests.support.models import DEFAULT_VOCAB_SIZE, EOS_TOKEN_ID, tiny_model
from tests.support.ports import served
from tests.support.scripted import until

NUM_SLOTS = 2
LIMITS = EngineLimits(gamma=4, eos_token_ids=frozenset([EOS_TOKEN_ID]))
WORDS = Vocabulary("f", DEFAULT_VOCAB_SIZE)
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{50}")
PENALIZED = SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.4)
LONG = [
    GenerationRequest((7, 8, 9), max_new_tokens=50),
    GenerationRequest((5, 6), PENALIZED, max_new_tokens=50, logprobs=2),
    GenerationRequest((5, 6, 7), SamplingParams(0.8, seed=1), max_new_tokens=50, stop_at_eos=True, grammar=DIGITS),
    GenerationRequest((4, 8, 9), SamplingParams(1.2, seed=2), max_new_tokens=50, min_new_tokens=20, prompt_logprobs=1),
]
SHORT = [GenerationRequest((30 + i, 31), SamplingParams(1.0, seed=i), max_new_tokens=3) for i in range(6)]


def backend(*, seed: int, num_slots: int = 3) -> TorchBackend:
    return TorchBackend(tiny_model("llama", seed=seed), num_slots=num_slots, max_length=128)


def engine(decoder: Decoder) -> TargetEngine:
    return TargetEngine(decoder, replace(LIMITS, num_spare=decoder.num_slots - NUM_SLOTS), grammars())


class Scheduled:
    """Source of tokens that sends requests to a pool of draft workers, each with the given schedule."""

    def __init__(self, pool: DraftPool, schedule: Schedule) -> None:
        self.max_length, self.vocab_size, self.seed_invariant = pool.max_length, pool.vocab_size, pool.seed_invariant
        self._pool = pool
        self._schedule = schedule

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        return self._pool.generate(replace(request, schedule=self._schedule))


async def helped(stack: AsyncExitStack, schedule: Schedule) -> TokenSource:
    """Return a source of tokens: a target without spare slots, for which an attached worker drafts."""
    target = await stack.enter_async_context(running(engine(SlotDecoder(backend(seed=1)))))
    pool = DraftPool(target)
    at = await stack.enter_async_context(served(PortSecurity(), None, VerificationServicer(pool, WORDS)))
    drafting = DraftEngine(ModelProposer(backend(seed=2, num_slots=NUM_SLOTS)), grammars=grammars())
    drafts = await stack.enter_async_context(running(drafting))
    worker = PoolWorker(drafts, [f"127.0.0.1:{at.grpc}"], Offer(WORDS, 4, NUM_SLOTS), Metrics("draft"))
    stack.push_async_callback(worker.stop, grace_s=0.0)
    await until(lambda: worker.fault is None)
    return Scheduled(pool, schedule)


@pytest.fixture(params=["target", "target without a spare slot", "fused", *Schedule], ids=str)
async def generator(request: pytest.FixtureRequest) -> AsyncGenerator[TokenSource, None]:
    async with AsyncExitStack() as stack:
        if isinstance(request.param, Schedule):
            yield await helped(stack, request.param)
            return
        decoder: Decoder = SlotDecoder(backend(seed=1, num_slots=2 if "without" in request.param else 3))
        if request.param == "fused":
            decoder = SpeculativeDecoder(decoder, ModelProposer(backend(seed=2)))
        yield await stack.enter_async_context(running(engine(decoder)))


async def answer(
    generator: TokenSource, request: GenerationRequest, account: str, log: list[str]
) -> tuple[object, ...]:
    """Return (a request's tokens, its prompt's scores); add `account` to `log` at each token, and a line at the end."""
    output = list[int]()
    scores: tuple[object, ...] = ()
    with request_context(Caller(account), "id"):
        async for event in generator.generate(request):
            if isinstance(event, Opened):
                scores = tuple(score.token_ids for score in event.prompt_logprobs)
            elif isinstance(event, Commit):
                assert event.position == len(request.prompt_token_ids) + len(output)
                output += event.token_ids
                log += [account] * len(event.token_ids)
    log.append(f"{account} has ended")
    return output, scores


async def test_a_flood_of_long_answers_yields_to_another_account(generator: TokenSource) -> None:
    """An account's long answers give way to requests of another account.

    Regression: with access tokens but without limits, one account's long answers delayed another's first token by
    19 s.
    """
    async with running(TargetEngine(SlotDecoder(backend(seed=1, num_slots=10)), LIMITS, grammars())) as undisturbed:
        expected = await asyncio.gather(*(answer(undisturbed, each, "", []) for each in [*LONG, *SHORT]))
    log = list[str]()
    flood = [asyncio.create_task(answer(generator, each, "a", log)) for each in LONG]
    async with asyncio.timeout(60):
        await until(lambda: len(log) >= 8)
        brief = [await answer(generator, each, "b", log) for each in SHORT]
        assert [*await asyncio.gather(*flood), *brief] == expected
    assert "a has ended" not in log[: log.index("b has ended")]
