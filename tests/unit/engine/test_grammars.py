"""The engine compiles grammars in a bounded number of threads; a failure ends one request, with an error."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.caller import Caller, request_context
from specdec.inference.commit import Commit
from specdec.inference.engine.grammars import MAX_WAITING, Grammars
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import CapacityError, InternalError, InvalidRequestError
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text import grammar_trial
from specdec.inference.text.grammar import GrammarCompiler, GrammarMatcher
from tests.support.answers import commits_of, each_commit
from tests.support.grammars import COMPILER, TOKENIZER
from tests.support.models import DEFAULT_VOCAB_SIZE, EOS_TOKEN_ID, tiny_model
from tests.support.scripted import ScriptedDecoder, until

WORDS = Grammar(GrammarKind.REGEX, "(the|a)[0-9]{3}")
REQUEST = GenerationRequest((7, 8, 9), max_new_tokens=20, stop_at_eos=True, grammar=WORDS)


class SlowCompiler(GrammarCompiler):
    """Compiler that waits for the event `let`: with grammar `slow` only, or with each grammar if `slow` is None."""

    slow: Grammar | None = None

    def __init__(self) -> None:
        super().__init__(TOKENIZER, DEFAULT_VOCAB_SIZE)
        self.let = threading.Event()

    def compile(self, grammar: Grammar, is_awaited: Callable[[], bool] = lambda: False) -> GrammarMatcher:
        if self.slow in (None, grammar):
            self.let.wait(60)
        return super().compile(grammar, is_awaited)


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


def grammar_of(i: int) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps([f"burst{i}a", f"burst{i}b"]))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the source of each grammar which is compiled on trial in a separate process."""
    tried, survives = list[str](), grammar_trial._survives

    def note(source: str, is_awaited: Callable[[], bool]) -> bool:
        tried.append(source)
        return survives(source, is_awaited)

    monkeypatch.setattr(grammar_trial, "_survives", note)
    monkeypatch.setattr(grammar_trial, "_results", {})
    return tried


async def test_a_burst_with_a_few_grammars_is_answered(trials: list[str]) -> None:
    """A burst of requests with grammars is answered where the queue has room, and equal grammars are compiled once.

    Regression: each request took one of 16 places for compiling, whatever its grammar, and 82 of 200 were refused.
    """
    backend = TorchBackend(tiny_model("llama", seed=1), num_slots=8, max_length=60)
    limits = EngineLimits(max_waiting=192, eos_token_ids=frozenset([EOS_TOKEN_ID]))
    grammars = Grammars(COMPILER, num_places=200)
    async with running(TargetEngine(SlotDecoder(backend), limits, grammars)) as engine:
        asked = [replace(REQUEST, max_new_tokens=2, grammar=grammar_of(i % 7)) for i in range(200)]
        answers = await asyncio.gather(*(commits(engine, each) for each in asked))
    assert all(answers)
    assert len(trials) == 7


async def test_a_known_grammar_waits_for_no_trial() -> None:
    compiler = SlowCompiler()
    grammars = Grammars(compiler)
    compiler.let.set()
    await grammars.matcher(WORDS)
    compiler.slow, compiler.let = grammar_of(1), threading.Event()
    trial = asyncio.create_task(grammars.matcher(grammar_of(1)))
    async with asyncio.timeout(60):
        for _ in range(2 * MAX_WAITING):
            assert (await grammars.matcher(WORDS)).goes_on(())
    assert not trial.done()
    compiler.let.set()
    assert (await trial).goes_on(())


async def test_equal_grammars_are_ready_together_whoever_asked_first() -> None:
    """A request goes on as soon as its grammar is compiled for another request, even if it is far back in the queue."""
    compiler = SlowCompiler()
    grammars = Grammars(compiler)
    compiler.slow, order = grammar_of(0), list[int]()

    async def ask(i: int) -> None:
        await grammars.matcher(grammar_of(i))
        order.append(i)

    tasks = [asyncio.create_task(ask(i)) for i in (1, 0, 2, 1)]
    await until(lambda: len(order) == 2)
    assert order == [1, 1]
    compiler.let.set()
    await asyncio.gather(*tasks)
    assert sorted(order) == [0, 1, 1, 2]


async def test_a_fault_is_the_same_for_all_that_ask(trials: list[str]) -> None:
    grammars, wrong = Grammars(COMPILER), Grammar(GrammarKind.REGEX, "(a")
    errors = await asyncio.gather(*(grammars.matcher(wrong) for _ in range(20)), return_exceptions=True)
    errors += await asyncio.gather(grammars.matcher(wrong), return_exceptions=True)
    assert {type(error) for error in errors} == {InvalidRequestError}
    assert len({str(error) for error in errors}) == 1
    assert len(trials) == 1


async def test_a_request_that_gives_up_leaves_its_place() -> None:
    """If a request that waits for a grammar is cancelled, others that ask for the grammar still get it."""
    compiler = SlowCompiler()
    grammars = Grammars(compiler, num_places=2)
    compiler.slow = WORDS
    first = asyncio.create_task(grammars.matcher(WORDS))
    for _ in range(3):
        gone = asyncio.create_task(grammars.matcher(WORDS))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    last = asyncio.create_task(grammars.matcher(WORDS))
    await asyncio.sleep(0.01)
    with pytest.raises(CapacityError, match="threads for new grammars are busy and 1 requests wait"):
        await grammars.matcher(grammar_of(1))
    first.cancel()
    compiler.let.set()
    assert (await asyncio.wait_for(last, 60)).goes_on(())


BOMB = "start: T\nT: " + " & ".join(f"/(.|\\n)*[c-z]{{{i}}}(.|\\n)*/" for i in range(1, 40))


async def test_a_trial_ends_for_another_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that compiles too long while another account waits is given up, and its error allows a retry.

    Regression: limits were of CPU time alone, so on a busy machine one bad grammar made a request of another account
    wait for 12 s and be refused. Here the bad grammar may take 60 s of CPU time.
    """
    monkeypatch.setattr(grammar_trial, "TRIAL_CPU_S", 60)
    monkeypatch.setattr(grammar_trial, "TRIAL_BYTES", 8 << 30)
    monkeypatch.setattr(grammar_trial, "TRIAL_WALL_S", 0.5)
    grammars, bomb = Grammars(COMPILER), Grammar(GrammarKind.GRAMMAR, BOMB)

    async def ask(account: str, grammar: Grammar) -> object:
        with request_context(Caller(account), "id"):
            return await grammars.matcher(grammar)

    bombing = asyncio.create_task(ask("mallory", bomb))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(ask("alice", grammar_of(9)), 50)
    with pytest.raises(CapacityError, match=r"the machine is busy: .* within 0.5 s"):
        await bombing


async def test_the_words_are_ready_before_the_first_request() -> None:
    """Tables that all grammars share are made at the start; if they cannot be made for a tokenizer, the server goes on.

    Regression: the first request on a busy machine waited for the tables, and its error was that others' grammars were
    being compiled.
    """
    compiler = GrammarCompiler(TOKENIZER, DEFAULT_VOCAB_SIZE)
    await Grammars(compiler).warm_up()
    assert "_words" in vars(compiler)
    broken = GrammarCompiler(TOKENIZER, DEFAULT_VOCAB_SIZE)
    vars(broken)["eos_token_ids"] = frozenset([1 << 40])
    await Grammars(broken).warm_up()
    assert "_words" not in vars(broken)


async def test_a_matcher_that_refuses_what_it_allowed_is_internal(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a matcher refuses a token that it allowed before, its session ends with INTERNAL, and other sessions go on."""
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
