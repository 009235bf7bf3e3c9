"""Grammars in the engine are compiled in bounded threads; a failure ends one request, with an error."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.commit import Commit
from specdec.inference.engine import grammars as module
from specdec.inference.engine.grammars import MAX_COMPILING, Grammars
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import CapacityError, InternalError, InvalidRequestError
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text.grammar import GrammarCompiler, GrammarMatcher
from tests.support.answers import commits_of, each_commit
from tests.support.grammars import COMPILER, TOKENIZER
from tests.support.models import DEFAULT_VOCAB_SIZE, EOS_TOKEN_ID, tiny_model
from tests.support.scripted import ScriptedDecoder

WORDS = Grammar(GrammarKind.REGEX, "(the|a)[0-9]{3}")
REQUEST = GenerationRequest((7, 8, 9), max_new_tokens=20, stop_at_eos=True, grammar=WORDS)


class SlowCompiler(GrammarCompiler):
    """Compiler that waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, DEFAULT_VOCAB_SIZE)
        self.let = threading.Event()

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        self.let.wait(20)
        return super().compile(grammar)


@pytest_asyncio.fixture
async def engine() -> AsyncGenerator[TargetEngine, None]:
    backend = TorchBackend(tiny_model("llama", seed=1), num_slots=2, max_length=60)
    limits = EngineLimits(eos_token_ids=frozenset([EOS_TOKEN_ID]))
    async with running(TargetEngine(SlotDecoder(backend), limits, Grammars(COMPILER))) as engine:
        yield engine


async def commits(engine: TargetEngine, request: GenerationRequest = REQUEST) -> list[Commit]:
    return await commits_of(engine.generate(request))


async def test_the_loop_goes_on_while_a_grammar_is_compiled() -> None:
    compiler = SlowCompiler()
    compiling = asyncio.create_task(Grammars(compiler).matcher(WORDS))
    started = time.monotonic()
    for _ in range(10):
        await asyncio.sleep(0)
    assert time.monotonic() - started < 1.0
    assert not compiling.done()
    compiler.let.set()
    assert (await compiling).goes_on(())


async def test_few_wait_in_line_and_none_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that wait for a compiling thread have limits of number and time; the error beyond them allows a retry.

    Regression: a busy machine refused valid grammars with INVALID_ARGUMENT, after which clients did not
    retry.
    """
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)
    compiler = SlowCompiler()
    grammars = Grammars(compiler)
    asking = [grammars.matcher(WORDS) for _ in range(MAX_COMPILING + 1)]
    *slow, last = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(error, CapacityError) and "after 0.05 s" in str(error) for error in slow)
    assert isinstance(last, CapacityError)
    assert f"{MAX_COMPILING - 1} requests wait" in str(last)
    compiler.let.set()
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 10.0)
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await grammars.matcher(WORDS)).goes_on(())
                return
            except CapacityError:
                await asyncio.sleep(0.01)


async def test_a_matcher_that_refuses_what_it_allowed_is_internal(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matcher that refuses a token that it allowed ends its session with INTERNAL, and no other session."""
    lying = COMPILER.compile(WORDS)
    monkeypatch.setattr(lying, "_go_to", lambda tokens: max(0, len(tokens) - 1))
    session = engine.open(REQUEST, grammar=lying)
    other = asyncio.create_task(commits(engine))
    with pytest.raises(InternalError, match="refuses token"):
        async for _ in each_commit(engine.answer(session)):
            pass
    assert (await other)[-1].token_ids[-1] == EOS_TOKEN_ID
    assert engine.num_running == 0


async def test_a_decoder_that_chooses_elsewhere_refuses_by_name() -> None:
    engine = TargetEngine(ScriptedDecoder(), grammars=Grammars(COMPILER))
    with pytest.raises(InvalidRequestError, match="ScriptedDecoder") as caught:
        await commits(engine)
    assert caught.value.field == "grammar"


@pytest.mark.parametrize(
    ("name", "others"), [("ignore_eos", {"stop_at_eos": False}), ("min_new_tokens", {"min_new_tokens": 3})]
)
def test_contradictions_of_a_grammar_are_refused(name: str, others: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        GenerationRequest((1,), **{"stop_at_eos": True, "grammar": WORDS, **others})  # type: ignore[arg-type]
    assert caught.value.field == name
