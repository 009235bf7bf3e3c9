"""A draft model's proposals depend only on the sequence, not on earlier use of its slot or on other sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.model.decoder import Turn
from specdec.inference.model.proposer import Draft
from specdec.inference.model.slots import Span
from specdec.inference.request import SamplingParams
from specdec.inference.speculation import model_proposer as module
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from tests.support.models import tiny_model
from tests.support.scripted import ids_of

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def backend() -> TorchBackend:
    return TorchBackend(tiny_model("llama", seed=1), num_slots=3, max_length=96)


def fresh(backend: TorchBackend, token_ids: Sequence[int], sampling: SamplingParams) -> int:
    """Return the token that a new proposer, without earlier use, gives for a sequence."""
    return extended(ModelProposer(backend), [Draft(2, token_ids, sampling, limit=1)])[0]


def extended(proposer: ModelProposer, drafts: Sequence[Draft]) -> list[int]:
    """Return the draft tokens of all drafts, in order, of one step of the proposer."""
    return [token_id for extension in ids_of(proposer.extend(drafts)) for token_id in extension or ()]


def changed(chain: list[int], rng: random.Random) -> list[int]:
    kind = rng.choice(["keep", "keep", "cut", "correct", "replace"])
    if kind == "cut" or len(chain) > 40:
        return chain[: rng.randint(1, len(chain))]
    if kind == "correct":
        place = rng.randrange(len(chain))
        return [*chain[:place], rng.randrange(2, 200)]
    if kind == "replace":
        return [rng.randrange(2, 200) for _ in range(rng.randint(1, 9))]
    return chain


def test_chains_may_be_any_sequence(backend: TorchBackend) -> None:
    """The token ids of a draft may be a list or a tuple.

    Regression: a tuple that continued the list of tokens in a slot was taken to be in the slot as a whole.
    """
    proposer = ModelProposer(backend)
    (first,) = extended(proposer, [Draft(0, (4, 5), GREEDY, limit=1)])
    (second,) = extended(proposer, [Draft(0, (4, 5, first), GREEDY, limit=1)])
    assert second == fresh(backend, [4, 5, first], GREEDY)


def test_long_prompts_are_read_in_parts(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is read in parts, beside another sequence that grows; it gets the token as if read at once."""
    prompt = tuple(range(2, 52))
    whole = fresh(backend, prompt, SAMPLED)
    monkeypatch.setattr(module, "MAX_CHUNK_TOKENS", 20)
    proposer, chain = ModelProposer(backend), [5, 6]
    results = []
    for _ in range(3):
        drafts = [Draft(0, prompt, SAMPLED, limit=1), Draft(1, tuple(chain), GREEDY, limit=1)]
        long, short = ids_of(proposer.extend(drafts))
        assert short == [fresh(backend, chain, GREEDY)]
        chain += short
        results.append(long)
    assert results == [None, None, [whole]]


def test_slot_decoder_chooses_what_it_would_choose_alone(backend: TorchBackend) -> None:
    """In one pass, a part of a prompt and sessions with and without a proposal get the tokens that each gets alone."""
    prompt = tuple(range(30, 40))
    alone = ModelProposer(backend)
    continuation: list[int] = []
    for _ in range(4):
        continuation += extended(alone, [Draft(2, (*prompt, *continuation), SAMPLED, limit=1)])
    decoder = SlotDecoder(backend)
    wrong = continuation[2] + 1 if continuation[2] < 200 else 5
    part, plain, drafted = decoder.step(
        [
            Turn(0, 0, prompt[:6], SAMPLED, chooses=False),
            Turn(1, 0, prompt, SAMPLED),
            Turn(2, 0, prompt, SAMPLED, proposal=[*continuation[:2], wrong, 7]),
        ]
    )
    assert part.token_ids == ()
    assert plain.token_ids == (continuation[0],)
    assert drafted.token_ids == tuple(continuation[:3])
    assert (drafted.num_draft_tokens, drafted.num_accepted_tokens) == (4, 2)
    (rest,) = decoder.step([Turn(0, 6, prompt, SAMPLED)])
    assert rest.token_ids == (continuation[0],)
    (following,) = decoder.step([Turn(2, len(prompt) + 2, (*prompt, *continuation[:3]), SAMPLED)])
    assert following.token_ids == (continuation[3],)


def test_a_step_without_choices_runs(backend: TorchBackend) -> None:
    (verdict,) = SlotDecoder(backend).step([Turn(0, 0, (3, 4), GREEDY, chooses=False)])
    assert verdict.token_ids == ()


def test_forked_branches_draft_what_a_fresh_slot_would() -> None:
    """Chains and branches (alternatives copied from them) get a fresh slot's tokens, whatever was in their slots."""
    rng = random.Random(7)
    other = TorchBackend(tiny_model("llama", seed=1), num_slots=1, max_length=96)
    proposer = ModelProposer(TorchBackend(tiny_model("llama", seed=1), num_slots=6, max_length=96), num_branches=2)
    assert (proposer.num_slots, proposer.num_branches) == (2, 2)
    chains = [[5, 6, 7], [8, 9]]
    for _ in range(40):
        drafts = []
        for slot, chain in enumerate(chains):
            drafts.append(Draft(slot, tuple(chain), SAMPLED, limit=4))
            for branch in rng.sample([0, 1], rng.randint(0, 2)):
                path = [
                    *chain[: rng.randint(1, len(chain))],
                    *(rng.randrange(2, 200) for _ in range(rng.randint(1, 3))),
                ]
                drafts.append(Draft(2 + 2 * slot + branch, path, SAMPLED, limit=1, source_slot=slot))
        ranked = proposer.extend(drafts, ranked=True)
        for draft, extension in zip(drafts, ranked, strict=True):
            (expected,) = ModelProposer(other).extend([Draft(0, draft.token_ids, SAMPLED, limit=1)], ranked=True)
            assert extension is not None
            assert expected is not None
            assert (extension[0].token_id, extension[0].runner_up) == (expected[0].token_id, expected[0].runner_up)
            assert extension[0].margin == pytest.approx(expected[0].margin, abs=1e-4)
            if draft.source_slot is None:
                chains[draft.slot].append(extension[0].token_id)
        chains = [changed(chain, rng) for chain in chains]


def test_a_fork_saves_reading_the_prefix() -> None:
    backend = TorchBackend(tiny_model("llama", seed=1), num_slots=2, max_length=96)
    proposer, prompt = ModelProposer(backend, num_branches=1), tuple(range(2, 42))
    extended(proposer, [Draft(0, prompt, GREEDY, limit=1)])
    with widths_of(backend) as widths:
        extended(proposer, [Draft(1, (*prompt[:30], 7), GREEDY, limit=1, source_slot=0)])
    assert widths == [1]


@contextmanager
def widths_of(backend: TorchBackend) -> Iterator[list[int]]:
    """Yield a list to which the number of tokens of each span is appended as the backend reads it."""
    widths: list[int] = []
    forward = backend.forward

    def forward_measured(spans: Sequence[Span]) -> object:
        widths.extend(len(span.token_ids) for span in spans)
        return forward(spans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "forward", forward_measured)
        yield widths


class Unforkable:
    """A backend with only the methods of the protocol `Backend`, so that it cannot copy slots."""

    vocab_size, num_slots, max_length, slot_bytes = 4, 8, 16, 0

    def forward(self, spans: Sequence[Span]) -> None: ...


def test_a_backend_that_cannot_fork_gives_no_branches() -> None:
    proposer = ModelProposer(Unforkable(), num_branches=3)
    assert (proposer.num_slots, proposer.num_branches) == (2, 0)
