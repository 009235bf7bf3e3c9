"""A draft with another tokenizer changes neither the target's tokens nor their distribution.

Its tokens are accepted as often as they must be if draft and target use the same random numbers (noise). The toy models
share four tokens under different ids, and each has tokens of its own; one token of the target is two of the draft's. A
wrong map between the tokens leaves the distribution as it is, and lowers the acceptance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.model.token_map import TokenMap
from specdec.inference.request import SamplingParams
from specdec.inference.speculation import model_proposer as module
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.support import law
from tests.support.models import tiny_model
from tests.support.scripted import ids_of
from tests.unit.speculation.test_model_proposer import widths_of
from tests.unit.speculation.test_padding import (
    ALPHA,
    ASKED,
    NUM_SEEDS,
    bigrams,
    promised,
    sampled,
    toy_pair,
    within_error,
)

Columns = npt.NDArray[np.int64]
NUM_TARGET, NUM_OWN = 6, 7
OWN = {0: (5,), 1: (3,), 2: (0,), 3: (6,), 4: (1, 2), 5: ()}
"""Draft ids of each id of the toy target: id 4 has the text of two draft ids; the draft lacks 5, a special token."""
COLUMNS = np.array([6, 4, 1, 7, 0, 0])
TOY = TokenMap(NUM_TARGET, "toy", COLUMNS, OWN)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, seed=3)
SHARED = np.flatnonzero(COLUMNS)
PAIR = SHARED, COLUMNS[SHARED] - 1
TARGET, DRAFT = toy_pair(NUM_TARGET, NUM_OWN, PAIR)
PROMISED = promised(TARGET, DRAFT, PAIR, OWN[0][-1])


def pair_with(token_map: TokenMap) -> SpeculativeDecoder:
    return SpeculativeDecoder(SlotDecoder(bigrams(TARGET)), ModelProposer(bigrams(DRAFT)), token_map=token_map)


def test_samples_have_the_targets_law_and_the_draft_its_promise() -> None:
    found = sampled(pair_with(TOY))
    choices = law.choice_table(TARGET.astype(np.float32), ASKED, num_seeds=NUM_SEEDS, num_positions=4)
    assert found.outputs == law.decode([table[1:] for table in choices])
    assert law.law_p_value(found.outputs, TARGET, ASKED) > ALPHA
    assert within_error(found.acceptance, PROMISED, 4.0)


def off_by_one(columns: Columns) -> Columns:
    return np.where(columns > 0, columns % NUM_OWN + 1, 0)


def with_and_without_space(columns: Columns) -> Columns:
    """Return a wrong map of tokens, in which the columns of " the" and "the" are swapped."""
    return columns[[1, 0, 3, 2, 4, 5]]


def special_as_text(columns: Columns) -> Columns:
    """Return a wrong map of tokens, in which a special token that the draft lacks has a text token's column."""
    return np.where(np.arange(NUM_TARGET) == 5, columns[0], columns)


@pytest.mark.parametrize("wrong", [off_by_one, with_and_without_space, special_as_text])
def test_a_wrong_map_keeps_the_law_but_not_the_promise(wrong: Callable[[Columns], Columns]) -> None:
    found = sampled(pair_with(replace(TOY, columns=wrong(COLUMNS), _moved={})))
    assert law.law_p_value(found.outputs, TARGET, ASKED) > ALPHA
    assert not within_error(found.acceptance, PROMISED, 8.0)


SPELLED = {token_id: tuple((token_id * 7 + n) % 287 + 1 for n in range(token_id % 4)) for token_id in range(288)}
"""Draft ids of each target id: none for every fourth id, and up to three for the others."""
SPELLING = TokenMap(288, "spelling", np.roll(np.arange(1, 289), 5), SPELLED, prefix=(9,))
RENAMING = TokenMap(288, "renaming", np.arange(288, 0, -1), {n: (287 - n,) for n in range(288)})


@pytest.fixture(scope="module")
def backend() -> TorchBackend:
    return TorchBackend(tiny_model("llama", seed=1), num_slots=6, max_length=96)


def fresh(backend: TorchBackend, draft: Draft) -> list[int]:
    """Return a new proposer's tokens for a draft, read at once into an empty slot; [] if the slot is too short."""
    own_ids = [*draft.token_map.prefix, *draft.token_map.read([*draft.token_ids])]
    if len(own_ids) > backend.max_length:
        return []
    proposer = ModelProposer(backend)
    while (extended := ids_of(proposer.extend([replace(draft, slot=5, source_slot=None)]))[0]) is None:
        pass
    return extended


def test_random_histories_of_several_maps(backend: TorchBackend) -> None:
    """Drafts with three maps of tokens get the draft tokens of a fresh slot, whatever their slots held before."""
    rng, maps = random.Random(4), (SPELLING, RENAMING, TokenMap())
    proposer, chains = ModelProposer(backend), [[5, 6, 7], [9], [11]]
    for step in range(80):
        slots = rng.sample([0, 1, 2], rng.choice([1, 2, 3]))
        drafts = [
            Draft(s, [*chains[s]], (GREEDY, SAMPLED)[s % 2], 4, token_map=maps[(s + step // 30) % 3]) for s in slots
        ]
        extensions = ids_of(proposer.extend(drafts))
        alone = [fresh(backend, draft) for draft in drafts]  # overwrites slot 5 alone
        for draft, extension, expected in zip(drafts, extensions, alone, strict=True):
            assert extension == expected
            kind = rng.choice(["grow", "grow", "cut", "replace"])
            chain = [*draft.token_ids, *extension, *(rng.randrange(2, 200) for _ in range(rng.randint(1, 6)))]
            cut = chain[: rng.randint(1, len(chain))] if kind == "cut" or len(chain) > 80 else chain
            chains[draft.slot] = [rng.randrange(1, 200) for _ in range(3)] if kind == "replace" else cut


def test_a_long_prompt_is_read_in_parts_and_a_full_slot_proposes_nothing(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is read in parts of limited length in draft ids; one too long for its slot gets no draft tokens."""
    prompt = tuple(range(2, 32))
    draft = Draft(0, prompt, SAMPLED, limit=1, token_map=SPELLING)
    whole = ModelProposer(backend).extend([draft])
    monkeypatch.setattr(module, "MAX_CHUNK_TOKENS", 2)
    proposer = ModelProposer(backend)
    results: list[list[DraftToken] | None] = []
    while not results or results[-1] is None:
        results += proposer.extend([draft])
    assert results[-1] == whole[0]
    assert len(results) == -(-(1 + len(SPELLING.read(prompt))) // 2)
    long = replace(draft, token_ids=tuple(range(2, 90)))
    assert len(long.token_ids) < backend.max_length < len(SPELLING.read(long.token_ids))
    assert proposer.extend([long, replace(draft, slot=1, token_ids=(4, 8))])[0] == []


def test_branches_and_prefixes_begin_where_their_own_tokens_agree(backend: TorchBackend) -> None:
    proposer, chain = ModelProposer(backend, num_branches=2), (5, 6, 7, 10, 11)
    proposer.extend([Draft(0, chain, SAMPLED, limit=1, token_map=SPELLING)])
    branch = Draft(2, (*chain[:3], 13), SAMPLED, 1, source_slot=0, token_map=SPELLING)
    widths = watched(backend, proposer, [branch])
    assert widths == [len(SPELLED[13])]
    proposer.begin(1, 0, chain[:4])
    other = Draft(1, (*chain[:4], 15), SAMPLED, 1, token_map=SPELLING)
    assert watched(backend, proposer, [other]) == [len(SPELLED[15])]


def watched(backend: TorchBackend, proposer: ModelProposer, drafts: Sequence[Draft]) -> list[int]:
    """Propose for some drafts, and assert the tokens; return how many tokens were read for each draft."""
    with widths_of(backend) as widths:
        chosen = ids_of(proposer.extend(drafts))
    assert chosen == [fresh(backend, draft) for draft in drafts]
    return widths
