"""Contract of a target's engines: `EngineContract`, a class of tests from which the test class of each engine inherits.

Its main rule: a request's tokens depend only on model, parameters and seed, neither on a draft worker's proposals nor
on the server that began it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.backends.registry import load_backend
from specdec.inference.commit import Commit, FinishReason, Opened
from specdec.inference.config import ModelConfig
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import CapacityError, ContextLengthError, InvalidRequestError, UnavailableError
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, Noise, SamplingParams, Schedule
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.tree import MAX_TREE_TOKENS, Branch
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import Tokenizer
from tests.support.models import EOS_TOKEN_ID
from tests.support.scripted import until


def onnx_engine(path: Path, max_length: int, noise: Noise = Noise.SPECDEC) -> TargetEngine:
    """Return an engine that is not started yet, over the model in `path` on backend onnx.

    It runs four requests at a time, and queues two more. `max_length` is its context in tokens; `noise` is the rule by
    which a seed gives the random numbers.
    """
    config = ModelConfig(path, backend="onnx", sequence_length=max_length, num_slots=4, num_threads=1)
    backend, tokenizer = load_backend(config), Tokenizer.load(path)
    limits = EngineLimits(max_waiting=2, eos_token_ids=tokenizer.eos_token_ids, lookup=False, noise=noise)
    return TargetEngine(SlotDecoder(backend), limits, Grammars(GrammarCompiler(tokenizer, backend.vocab_size)))


PROMPT = tuple(b"a plain prompt of a few words")
LENGTH = 40
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "noise": {"temperature": 0.8, "seed": 7},
    "top_k and top_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 2**64 - 3},
    "min_p": {"temperature": 0.9, "min_p": 0.05, "seed": 5},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "greedy with a penalty": {"repetition_penalty": 1.3},
    "penalties of the output": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    "bias": {"temperature": 0.8, "seed": 4, "logit_bias": ((70, 2.0), (100, 3.0))},
}
"""Sampling parameters of test requests, by name: each changes in another way which token is chosen."""
REGEX = Grammar(GrammarKind.REGEX, "[a-z ]{12,30}")
TOO_COMPLEX = Grammar(GrammarKind.REGEX, "(([a-z]{0,99}){1,99}){1,99}")
"""Grammar that exceeds the grammar engine's limit of complexity after some fifteen tokens of output."""


def wanted(mode: str = "noise", prompt: Sequence[int] = PROMPT, **options: Any) -> GenerationRequest:
    """Return a request with the sampling parameters `MODES[mode]`; `options` are further fields of it.

    It asks for LENGTH tokens unless `options` has another `max_new_tokens`.
    """
    return GenerationRequest(tuple(prompt), SamplingParams(**MODES[mode]), **{"max_new_tokens": LENGTH, **options})


@dataclass(slots=True)
class Drafting:
    """Stand-in for a draft worker, which knows the output and proposes its next tokens, some of them made wrong.

    Attributes:
        tokens: the output's token ids.
        wrong: probability that a proposed token is wrong.
        chance: random numbers that decide which tokens are wrong.
    """

    tokens: Sequence[int]
    wrong: float
    chance: random.Random

    def branch(self, session: VerificationSession, start: int) -> Branch:
        """Return up to six draft tokens after the session's last token; `start` is the prompt's length in tokens."""
        length = len(session.token_ids)
        believed = self.tokens[length - start : length - start + 6]
        wrong = [token_id if self.chance.random() >= self.wrong else (token_id + 1) % 256 for token_id in believed]
        return Branch(None, length, wrong)


async def completed(
    engine: Any, request: GenerationRequest, drafting: Drafting | None = None
) -> tuple[list[int], list[Commit]]:
    """Run a request to its end; return its output tokens, and its commits (groups of final tokens).

    With `drafting` it gets draft tokens before its first pass and after each commit. Positions of commits are checked.
    """
    session = engine.open(request, grammar=await engine.compiled(request))
    start, opened = len(request.prompt_token_ids), 0
    commits: list[Commit] = []
    if drafting is not None:
        engine.begin_help(session, Schedule.ASYNC)
        engine.propose(session, [drafting.branch(session, start)])  # is there in time on any machine
    async with aclosing(engine.answer(session)) as events:
        async for event in events:
            if isinstance(event, Opened):
                opened += 1
                continue
            assert opened == 1
            assert event.position == start + sum(len(commit.token_ids) for commit in commits)
            assert event.num_accepted_tokens <= event.num_draft_tokens
            commits.append(event)
            if drafting is not None and (branch := drafting.branch(session, start)).token_ids:
                engine.propose(session, [branch])
    assert all(commit.finish_reason is None for commit in commits[:-1])
    return [token_id for commit in commits for token_id in commit.token_ids], commits


class DraftContract:
    """Tests of an engine's draft tokens: they never change the output, and the accepted ones are counted.

    A subclass overrides the fixture `engine` by an engine that runs four requests at a time, queues two more, and has a
    context of MAX_LENGTH tokens.
    """

    MAX_LENGTH = 128
    END: FinishReason | None = FinishReason.LENGTH
    """Finish reason in the last commit of an output that reached the request's limit of tokens."""

    @pytest.fixture
    def engine(self) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize("mode", MODES)
    async def test_the_tokens_do_not_depend_on_proposals(self, engine: Any, mode: str) -> None:
        tokens, commits = await completed(engine, wanted(mode))
        assert len(tokens) == LENGTH
        assert commits[-1].finish_reason is self.END
        for wrong in (0.0, 0.3, 1.0):
            drafting = Drafting(tokens, wrong, random.Random(5))
            drafted, with_drafts = await completed(engine, wanted(mode), drafting)
            assert drafted == tokens
            if wrong == 1.0:
                accepted = sum(commit.num_accepted_tokens - commit.own.num_lookup_accepted for commit in with_drafts)
                assert accepted <= 2  # a wrong one may be right by chance

    async def test_right_proposals_are_accepted_and_counted(self, engine: Any) -> None:
        tokens, commits = await completed(engine, wanted(), None)
        assert all(commit.num_draft_tokens == commit.own.num_tokens for commit in commits)
        session = engine.open(wanted())
        engine.begin_help(session, Schedule.ASYNC)
        engine.propose(session, [Branch(None, len(PROMPT), tokens)])
        async with aclosing(engine.answer(session)) as events:
            drafted = [event async for event in events if isinstance(event, Commit)]
        assert sum(commit.num_accepted_tokens for commit in drafted) > 0
        assert max(commit.num_received_tokens for commit in drafted) == LENGTH
        assert len(drafted) < len(commits)

    async def test_faulty_proposals_are_refused(self, engine: Any) -> None:
        session = engine.open(wanted())
        engine.begin_help(session, Schedule.ASYNC)
        end = len(PROMPT)
        for branch in (
            Branch(None, end, [engine.vocab_size]),
            Branch(None, end, [5] * (MAX_TREE_TOKENS + 1)),
            Branch(None, end + 100, [5]),
            Branch(3, 0, [5]),
        ):
            with pytest.raises(InvalidRequestError):
                engine.propose(session, [branch])
        engine.end_help(session)
        async with aclosing(engine.answer(session)) as events:
            tokens = [token_id async for event in events if isinstance(event, Commit) for token_id in event.token_ids]
        assert tokens == (await completed(engine, wanted()))[0]

    async def test_many_branches_of_one_proposal_are_welcome(self, engine: Any) -> None:
        """A draft worker may propose a thousand alternative branches of draft tokens in one message.

        Regression: vLLM's engine core took a message of more than 256 branches for malformed, and ended with its
        server.
        """
        tokens, _ = await completed(engine, wanted())
        session = engine.open(wanted())
        engine.begin_help(session, Schedule.ASYNC)
        async with aclosing(engine.answer(session)) as events:
            await anext(events)
            engine.propose(session, [Branch(None, len(PROMPT), [number % 256]) for number in range(1000)])
            drafted = [token_id async for event in events if isinstance(event, Commit) for token_id in event.token_ids]
        assert drafted == tokens

    async def test_workers_change_while_a_request_runs(self, engine: Any) -> None:
        """The tokens of a request stay the same if one draft worker after another proposes tokens for it.

        Each worker numbers its draft tokens from 0; the numbers of an earlier worker no longer count.
        """
        tokens, _ = await completed(engine, wanted())
        session = engine.open(wanted())
        drafted: list[int] = []
        names = set()
        async with aclosing(engine.answer(session)) as events:
            async for event in events:
                if isinstance(event, Commit):
                    drafted += event.token_ids
                    engine.begin_help(session, Schedule.ASYNC)
                    names.add(session.help_id)
                    here = len(session.token_ids)
                    rest = tokens[here - len(PROMPT) :][:4]
                    engine.propose(
                        session, [Branch(None, here, rest[:2]), Branch(1, 0, rest[2:])] if len(rest) == 4 else []
                    )
                    if len(drafted) % 3 == 0:
                        engine.end_help(session)
        assert drafted == tokens
        assert len(names) > 1

    async def test_many_requests_at_once_have_the_tokens_of_each_alone(self, engine: Any) -> None:
        requests = [wanted(mode, prompt=PROMPT[number:]) for number, mode in enumerate([*MODES][:4])]
        alone = [(await completed(engine, request))[0] for request in requests]
        drafts = [Drafting(tokens, 0.3, random.Random(3)) for tokens in alone]
        pairs = zip(requests, drafts, strict=True)
        together = await asyncio.gather(*(completed(engine, request, drafting) for request, drafting in pairs))
        assert [tokens for tokens, _ in together] == alone


class EngineContract(DraftContract):
    """Tests of a complete engine over a tiny model; `DraftContract` says which fixture a subclass overrides."""

    @pytest.mark.parametrize("mode", ["noise", "penalties", "penalties of the output", "bias"])
    async def test_a_resumed_request_goes_on_with_the_same_tokens(self, engine: Any, mode: str) -> None:
        """A request resumed with its first output tokens in the prompt goes on with the tokens it would have had.

        Penalties and the minimum length still count from the first output token, not from the resumed prompt's end.
        """
        request = wanted(mode, min_new_tokens=20, stop_token_ids=frozenset(range(97, 123)))
        tokens, _ = await completed(engine, request)
        assert len(tokens) >= 20
        for number in (1, 7, len(tokens) - 1):
            rest, _ = await completed(engine, request.resumed(tokens[:number]))
            assert tokens[:number] + rest == tokens

    async def test_an_output_keeps_to_its_grammar_also_where_it_resumes(self, engine: Any) -> None:
        request = wanted(grammar=REGEX, stop_at_eos=True)
        tokens, commits = await completed(engine, request)
        assert commits[-1].finish_reason is FinishReason.STOP
        assert (await completed(engine, request.resumed(tokens[:5])))[0] == tokens[5:]
        drafted, _ = await completed(engine, request, Drafting(tokens, 0.3, random.Random(2)))
        assert drafted == tokens

    async def test_a_grammar_that_becomes_too_complex_fails_its_request(self, engine: Any) -> None:
        """A request fails with InvalidRequestError once its output makes its grammar too complex to go on.

        Regression: on vLLM such an output looked complete, since this grammar allows an end at every token.
        """
        request = wanted("bias", grammar=TOO_COMPLEX, stop_at_eos=True)
        endless = replace(request.sampling, logit_bias=((EOS_TOKEN_ID, -100.0),))
        with pytest.raises(InvalidRequestError, match=r"too many expressions|too complex"):
            await completed(engine, replace(request, sampling=endless))
        assert (await completed(engine, wanted()))[1][-1].finish_reason is FinishReason.LENGTH

    async def test_a_stop_token_ends_the_output(self, engine: Any) -> None:
        tokens, _ = await completed(engine, wanted())
        stop = tokens[9]
        cut, commits = await completed(engine, wanted(stop_token_ids=frozenset({stop})))
        assert cut == tokens[: tokens.index(stop) + 1]
        assert commits[-1].finish_reason is FinishReason.STOP

    async def test_the_context_ends_the_output(self, engine: Any) -> None:
        tokens, commits = await completed(engine, wanted(max_new_tokens=10_000))
        assert len(PROMPT) + len(tokens) == self.MAX_LENGTH
        assert commits[-1].finish_reason is FinishReason.LENGTH

    async def test_log_probabilities_are_those_of_the_raw_logits(self, engine: Any) -> None:
        request = wanted("penalties", logprobs=2, prompt_logprobs=1)
        session = engine.open(request)
        async with aclosing(engine.answer(session)) as events:
            opened, *commits = [event async for event in events]
        assert [scores.token_ids[0] for scores in opened.prompt_logprobs] == [*PROMPT[1:]]
        for commit in commits:
            assert [scores.token_ids[0] for scores in commit.logprobs] == [*commit.token_ids]
        for scores in (each for commit in commits for each in commit.logprobs):
            own, best, second = scores.logprobs
            assert best >= second
            assert best >= own

    async def test_what_does_not_fit_is_refused(self, engine: Any) -> None:
        with pytest.raises(ContextLengthError):
            engine.open(wanted(prompt=[5] * self.MAX_LENGTH))
        with pytest.raises(InvalidRequestError):
            engine.open(wanted(prompt=[engine.vocab_size]))
        broken = replace(wanted(stop_at_eos=True), grammar=Grammar(GrammarKind.REGEX, "[a-z"))
        with pytest.raises(InvalidRequestError):
            await engine.compiled(broken)

    async def test_a_full_engine_refuses_and_a_closed_request_makes_room(self, engine: Any) -> None:
        sessions = [engine.open(wanted()) for _ in range(6)]
        with pytest.raises(CapacityError):
            engine.open(wanted())
        for session in sessions:
            engine.close(session)
        assert len((await completed(engine, wanted()))[0]) == LENGTH

    async def test_a_reader_that_leaves_ends_its_request(self, engine: Any) -> None:
        session = engine.open(wanted(max_new_tokens=90))
        async with aclosing(engine.answer(session)) as events:
            async for event in events:
                if isinstance(event, Commit):
                    break
        await until(lambda: engine.num_running == 0)
        assert engine.num_waiting == 0
        assert engine.fault is None

    async def test_a_failed_session_raises_its_error(self, engine: Any) -> None:
        session = engine.open(wanted())
        events = engine.answer(session)
        await anext(events)
        session.fail(UnavailableError("given up"))
        with pytest.raises(UnavailableError, match="given up"):
            async for _ in events:
                pass
        await until(lambda: engine.num_running == 0)
