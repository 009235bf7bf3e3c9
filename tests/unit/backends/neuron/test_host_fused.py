"""The fused graph with tokens that the host chooses serves every request, and answers as the target alone does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.inference.backends.neuron.decoders.fused import HostFusedDecoder
from specdec.inference.backends.neuron.decoders.graph_decoder import GraphDecoder
from specdec.inference.backends.neuron.graphs import fused_graph
from specdec.inference.backends.pytorch.backend import load_torch_backend
from specdec.inference.config import ModelConfig
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import InternalError, InvalidRequestError
from specdec.inference.model.decoder import Decoder, Turn, Verdict
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import Tokenizer
from tests.conftest import ModelDirectories
from tests.support.answers import commits_of
from tests.support.models import EOS_TOKEN_ID, tiny_tokenizer
from tests.support.neuron.engines import MAX_LENGTH, generate_all, requests, target_engine
from tests.unit.backends.neuron.test_fused import K, engine, load, turn

pytestmark = pytest.mark.release  # on the double; `make test-nxdi` runs it on NxDI's own sources in CI

Patch = pytest.MonkeyPatch


def torch_target(models: ModelDirectories) -> Any:
    """Load the target on the torch backend, which samples with the same noise as the fused graph's host."""
    config = ModelConfig(models.target, sequence_length=MAX_LENGTH, num_slots=3, num_threads=1)
    return target_engine(load_torch_backend(config))


def wanted() -> list[GenerationRequest]:
    """Return requests with temperature, seeds, top_k, top_p, min_p and penalties all over their ranges."""
    return requests(20, seed=3, sampled=True)


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_every_request_is_answered_as_by_the_torch_target(models: ModelDirectories, num_slots: int) -> None:
    decoder = load(models.target, models.related, num_slots=num_slots)
    assert isinstance(decoder, HostFusedDecoder)
    assert decoder.seed_invariant
    answers = await generate_all(engine(decoder), wanted())
    assert answers == await generate_all(torch_target(models), wanted())


async def test_logprobs_and_bias_are_the_target_s(models: ModelDirectories) -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, logit_bias=((7, 4.0), (8, -50.0)), frequency_penalty=0.4)
    request = GenerationRequest((5, 6, 7), sampling, max_new_tokens=12, logprobs=3)

    async def commits(running: Any) -> list[Any]:
        running.start()
        try:
            return [entry for commit in await commits_of(running.generate(request)) for entry in commit.logprobs]
        finally:
            await running.stop()

    found = await commits(engine(load(models.target, models.related)))
    expected = await commits(torch_target(models))
    assert [entry.token_ids[0] for entry in found] == [entry.token_ids[0] for entry in expected]
    for entry, other in zip(found, expected, strict=True):
        assert list(entry.token_ids[1:]) == list(other.token_ids[1:])
        assert entry.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
async def test_grammars_are_kept(models: ModelDirectories, temperature: float) -> None:
    """Answers keep to their grammar, though the graph's draft does not know it.

    A draft token that the grammar refuses counts as rejected.
    """
    tokenizer = Tokenizer(tiny_tokenizer(), frozenset([EOS_TOKEN_ID]))
    kinds = {GrammarKind.REGEX: "(the|a)+[0-9]{2,4}(in|ing)*", GrammarKind.CHOICE: '["the end", "the ending", "other"]'}
    asked = [
        GenerationRequest(
            (5, 6, 7 + seed),
            SamplingParams(temperature=temperature, seed=seed),
            max_new_tokens=14,
            grammar=Grammar(kind, text),
            stop_at_eos=True,
        )
        for seed in range(2)
        for kind, text in kinds.items()
    ]

    async def answers(decoder: Decoder, gamma: int) -> list[list[int]]:
        grammars = Grammars(GrammarCompiler(tokenizer, decoder.vocab_size))
        running = TargetEngine(decoder, EngineLimits(gamma=gamma, eos_token_ids=frozenset([EOS_TOKEN_ID])), grammars)
        return [token_ids for token_ids, _ in await generate_all(running, asked)]

    config = ModelConfig(models.target, sequence_length=MAX_LENGTH, num_slots=3, num_threads=1)
    found = await answers(load(models.target, models.related), K)
    assert found == await answers(SlotDecoder(load_torch_backend(config)), 0)
    assert all(len(token_ids) > 1 for token_ids in found)


async def test_a_graph_that_chooses_itself_refuses_grammars(models: ModelDirectories) -> None:
    request = GenerationRequest((5, 6), grammar=Grammar(GrammarKind.REGEX, "a+"), stop_at_eos=True)
    running = engine(load(models.target, models.related, device_sampling=True))
    with pytest.raises(InvalidRequestError, match="grammar"):
        await running.compiled(request)


def acceptance(decoder: GraphDecoder, *, num_slots: int, sampling: SamplingParams, gamma: int = K) -> float:
    """Decode sequences of unequal length in one pass; return the share of draft tokens accepted."""
    sequences = [list(range(20, 23 + 5 * slot)) for slot in range(num_slots)]
    decoder.step([Turn(slot, 0, tokens[:-1], sampling) for slot, tokens in enumerate(sequences)])
    drafted = accepted = 0
    for _ in range(8):
        turns = [Turn(slot, len(t) - 1, list(t), sampling, gamma=gamma) for slot, t in enumerate(sequences)]
        verdicts = decoder.step(turns)
        for tokens, verdict in zip(sequences, verdicts, strict=True):
            tokens += verdict.token_ids
        drafted += sum(verdict.num_draft_tokens for verdict in verdicts)
        accepted += sum(verdict.num_accepted_tokens for verdict in verdicts)
    return accepted / drafted


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 6])
def test_a_draft_that_is_its_target_is_always_right(models: ModelDirectories, num_slots: int, on_device: bool) -> None:
    """A draft with the target's own weights has all of its tokens accepted, also in a pass of several sequences.

    It was once otherwise: each sequence's mask had the others' draft tokens; only the count of accepted tokens shows
    it.
    """
    decoder = load(models.target, models.target, num_slots=num_slots, device_sampling=on_device)
    assert acceptance(decoder, num_slots=num_slots, sampling=SamplingParams()) == 1.0


@pytest.mark.usefixtures("artifacts")
def test_without_its_own_mask_a_draft_is_often_wrong(models: ModelDirectories, monkeypatch: Patch) -> None:
    """Drafts are often rejected if masks are shared as in NxDI, so the test above shows that ours are right."""
    monkeypatch.setattr(fused_graph, "_with_own_mask", lambda draft, args: args)
    decoder = load(models.target, models.target, num_slots=3)
    assert acceptance(decoder, num_slots=3, sampling=SamplingParams()) < 0.9


@pytest.mark.parametrize(("gamma", "num_drafted"), [(0, 0), (1, 1), (2, 2), (K, K - 1), (9, K - 1)])
def test_a_request_may_want_fewer_draft_tokens_or_none(models: ModelDirectories, gamma: int, num_drafted: int) -> None:
    """A request may ask for fewer draft tokens than the graph drafts, or for none, and gets the target's tokens."""
    decoder = load(models.target, models.target)
    tokens = [5, 6, 7]
    for _ in range(3):
        start = len(tokens) - 1 if len(tokens) > 3 else 0
        (verdict,) = decoder.step([replace(turn(tokens, start), gamma=gamma)])
        tokens += verdict.token_ids
    assert (verdict.num_draft_tokens, verdict.num_accepted_tokens) == (num_drafted, num_drafted)
    assert len(verdict.token_ids) == num_drafted + 1


async def test_an_end_is_held_back_as_on_torch(models: ModelDirectories) -> None:
    held = [replace(request, min_new_tokens=7, max_new_tokens=14) for request in wanted()]
    answers = await generate_all(engine(load(models.target, models.related)), held)
    assert answers == await generate_all(torch_target(models), held)


def test_only_missing_prompt_abilities_are_refused(models: ModelDirectories) -> None:
    """Only prompts that are too long and scores of prompt tokens are refused.

    The prompt graph reads prompts up to a length, and gives the logits of their last token alone.
    """
    decoder = load(models.target, models.related, overrides={"max_context_length": 32})
    with pytest.raises(InvalidRequestError, match="prompt_logprobs 0: this server's compiled prompt graph"):
        decoder.check(GenerationRequest((3,) * 3, prompt_logprobs=0))
    decoder.check(GenerationRequest((3,) * 32, SamplingParams(temperature=0.7, min_p=0.1, seed=1), logprobs=2))
    with pytest.raises(InvalidRequestError, match="the prompt has 33 tokens, the compiled prompt graph reads 32"):
        decoder.check(GenerationRequest((3,) * 33))


decided = HostFusedDecoder._decided


def greedily(self: HostFusedDecoder, turns: Sequence[Turn], logits: torch.Tensor) -> list[Verdict]:
    """Choose the most likely token of each row, as the device would."""
    return decided(self, [replace(turn, sampling=SamplingParams()) for turn in turns], logits)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "the graph's tokens are kept": (HostFusedDecoder, "_decided", greedily),
    "logits are one late": (
        HostFusedDecoder,
        "_decided",
        lambda self, turns, logits: decided(self, turns, logits.roll(1, dims=1)),
    ),
    "prompts list their logits twice": (fused_graph, "_listed_once", lambda outputs, _: outputs),
    "the draft has nothing for logits": (fused_graph, "_with_tokens_for_logits", lambda draft, args, outputs: outputs),
}


@pytest.mark.usefixtures("artifacts")
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_a_broken_rule_is_noticed(models: ModelDirectories, mutant: Any, monkeypatch: Patch) -> None:
    expected = await generate_all(torch_target(models), wanted())
    monkeypatch.setattr(*mutant)
    with pytest.raises((AssertionError, InternalError)):  # the engine's word for whatever NxDI raises
        assert await generate_all(engine(load(models.target, models.related)), wanted()) == expected
