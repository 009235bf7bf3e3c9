"""A fused graph (draft and target) whose tokens the host chooses serves every request, with the target's answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.inference.backends.neuron.decoders.fused import HostFusedDecoder
from specdec.inference.backends.neuron.decoders.graph_decoder import GraphDecoder
from specdec.inference.backends.pytorch.backend import load_torch_backend
from specdec.inference.config import ModelConfig
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import InvalidRequestError
from specdec.inference.model.decoder import Decoder, Turn
from specdec.inference.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.text.grammar import GrammarCompiler
from specdec.inference.text.tokenizer import Tokenizer
from tests.conftest import ModelDirectories
from tests.support.models import EOS_TOKEN_ID, tiny_tokenizer
from tests.support.neuron.engines import MAX_LENGTH, generate_all, requests
from tests.unit.backends.neuron.test_fused import K, engine, load, turn

pytestmark = pytest.mark.usefixtures("on_real")


def torch_decoder(models: ModelDirectories) -> SlotDecoder:
    """Load the target on backend torch; the fused graph must give the same tokens."""
    config = ModelConfig(models.target, sequence_length=MAX_LENGTH, num_slots=3, num_threads=1)
    return SlotDecoder(load_torch_backend(config))


def torch_target(models: ModelDirectories) -> TargetEngine:
    return TargetEngine(torch_decoder(models), EngineLimits(gamma=0))


def wanted() -> list[GenerationRequest]:
    """Return requests with temperature, seed, top_k, top_p, min_p and penalties from all over their ranges."""
    return requests(20, seed=3, sampled=True)


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_every_request_is_answered_as_by_the_torch_target(models: ModelDirectories, num_slots: int) -> None:
    decoder = load(models.target, models.related, num_slots=num_slots)
    assert isinstance(decoder, HostFusedDecoder)
    assert decoder.seed_invariant
    answers = await generate_all(engine(decoder), wanted())
    assert answers == await generate_all(torch_target(models), wanted())


@pytest.mark.parametrize("temperature", [0.0, 1.2])
async def test_answers_of_a_fused_graph_keep_to_their_grammar(models: ModelDirectories, temperature: float) -> None:
    """Answers of a fused graph follow the request's grammar, though the graph's draft does not know it.

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

    found = await answers(load(models.target, models.related), K)
    assert found == await answers(torch_decoder(models), 0)
    assert all(len(token_ids) > 1 for token_ids in found)


async def test_a_graph_that_chooses_itself_refuses_grammars(models: ModelDirectories) -> None:
    request = GenerationRequest((5, 6), grammar=Grammar(GrammarKind.REGEX, "a+"), stop_at_eos=True)
    running = engine(load(models.target, models.related, device_sampling=True))
    with pytest.raises(InvalidRequestError, match="grammar"):
        await running.compiled(request)


def acceptance(decoder: GraphDecoder, *, num_slots: int, sampling: SamplingParams, gamma: int = K) -> float:
    """Decode `num_slots` sequences of unequal length together, for 8 steps; return accepted over drafted tokens."""
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

    Regression: each sequence's attention mask had the draft tokens of all sequences. Tokens stayed right, only fewer
    draft tokens were accepted.
    """
    decoder = load(models.target, models.target, num_slots=num_slots, device_sampling=on_device)
    assert acceptance(decoder, num_slots=num_slots, sampling=SamplingParams()) == 1.0


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


def test_only_missing_prompt_abilities_are_refused(models: ModelDirectories) -> None:
    """A fused graph refuses a request only if its prompt is too long, or it asks for the prompt's log-probabilities.

    The compiled prompt graph reads prompts up to a length, and gives the logits of their last token alone.
    """
    decoder = load(models.target, models.related, overrides={"max_context_length": 32})
    with pytest.raises(InvalidRequestError, match="prompt_logprobs 0: this server's compiled prompt graph"):
        decoder.check(GenerationRequest((3,) * 3, prompt_logprobs=0))
    decoder.check(GenerationRequest((3,) * 32, SamplingParams(temperature=0.7, min_p=0.1, seed=1), logprobs=2))
    with pytest.raises(InvalidRequestError, match="the prompt has 33 tokens, the compiled prompt graph reads 32"):
        decoder.check(GenerationRequest((3,) * 33))
