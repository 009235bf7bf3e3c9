"""A draft padded to another vocabulary size changes neither the target's tokens nor their distribution.

The draft may lack ids of the target, or have more. Its tokens of ids that both have must be accepted as often as theory
says for random numbers that both share. Wrong variants of each part fail the same statistical tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.model.decoder import Decoder, Turn, Verdict
from specdec.inference.model.proposer import Draft
from specdec.inference.model.slots import Span
from specdec.inference.model.token_map import TokenMap
from specdec.inference.request import SamplingParams
from specdec.inference.speculation import model_proposer
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.support import law
from tests.support.models import tiny_model
from tests.support.scripted import ids_of

SMALL, LARGE, LENGTH = 280, 304, 48
SIZES = [(LARGE, SMALL), (SMALL, LARGE)]
PARAMETERS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=3),
    "truncated, repetition": SamplingParams(temperature=1.0, seed=9, top_k=50, top_p=0.9, repetition_penalty=1.3),
    "last id committed": SamplingParams(
        temperature=0.7, seed=1, logit_bias=((SMALL - 1, 6.0), (4, -100.0)), frequency_penalty=0.5
    ),
}
LACKED = replace(PARAMETERS["last id committed"], logit_bias=((LARGE - 1, 8.0), (LARGE - 2, 8.0)))
"""Sampling parameters whose biases make a target choose ids that the small draft lacks."""


def answer(decoder: Decoder, sampling: SamplingParams, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + num_tokens:
        turn = Turn(0, start, list(tokens), sampling, gamma=4, output_start=len(prompt))
        (verdict,) = decoder.step([turn])
        start = len(tokens) + len(verdict.token_ids) - 1
        tokens += verdict.token_ids
    return tokens[len(prompt) : len(prompt) + num_tokens]


@pytest.mark.parametrize(("target_size", "draft_size"), SIZES)
def test_tokens_are_the_targets_own(target_size: int, draft_size: int) -> None:
    target, draft = toy_pair(target_size, draft_size)
    alone = SlotDecoder(bigrams(target))
    pair = SpeculativeDecoder(alone, ModelProposer(bigrams(draft)))
    prompt = [5, 17, target_size - 1, 40]  # the draft may not have the third id
    asked = [*PARAMETERS.values(), *([LACKED] if target_size == LARGE else [])]
    for sampling in asked:
        expected = answer(alone, sampling, prompt, 32)
        assert answer(pair, sampling, prompt, 32) == expected
        assert max(expected) >= draft_size or sampling is not LACKED


@pytest.mark.parametrize(("target_size", "draft_size"), SIZES)
def test_drafts_propose_only_ids_that_the_target_has(target_size: int, draft_size: int) -> None:
    """A draft proposes only ids that its target has too, even if biases favour other ids.

    One pass of the draft has sequences of two targets.
    """
    backend = TorchBackend(tiny_model("llama", vocab_size=draft_size, seed=1), num_slots=2, max_length=LENGTH)
    edges = {SMALL - 1, min(SMALL, target_size - 1), target_size - 1}
    for sampling, ranked in itertools.product(PARAMETERS.values(), [False, True]):
        biased = replace(sampling, logit_bias=tuple((each, 50.0) for each in sorted(edges)))
        drafts = [
            Draft(0, [5, target_size - 1], biased, 1, 1, token_map=TokenMap(target_size)),
            Draft(1, [5], sampling, 1),
        ]
        (token,), _ = [each or [] for each in ModelProposer(backend).extend(drafts, ranked=ranked)]
        assert token.token_id < min(target_size, draft_size)
        assert (token.runner_up or 0) < min(target_size, draft_size)
        assert math.isfinite(token.margin) or token.runner_up is None


def test_one_pass_for_targets_of_two_sizes() -> None:
    """In a pass of a draft for two targets, each sequence gets ids of its own target, even if the other has fewer."""
    backend = TorchBackend(tiny_model("llama", vocab_size=SMALL, seed=1), num_slots=2, max_length=LENGTH)
    drafts = [
        Draft(0, [5], SamplingParams(), 1, token_map=TokenMap(1)),
        Draft(1, [5], SamplingParams(), 1, token_map=TokenMap(LARGE)),
    ]
    (cut,), (whole,) = (tokens or [] for tokens in ids_of(ModelProposer(backend).extend(drafts)))
    (alone,) = ids_of(ModelProposer(backend).extend(drafts[1:]))[0] or []
    assert (cut, whole) == (0, alone)
    assert whole != 0


FloatArray: TypeAlias = npt.NDArray[np.float64]
NUM_COMMON, NUM_PADDED, NUM_SEEDS, NUM_POSITIONS, BATCH = 4, 6, 2000, 3, 500
ASKED = SamplingParams(temperature=1.0)
ALPHA = 0.01 / 2
ALPHA_WRONG = ALPHA * 1e-6


def bigrams(logits: FloatArray) -> law.Bigrams:
    return law.Bigrams(logits, num_slots=BATCH, max_length=64)


class PaddedInFront(law.Bigrams):
    """Wrong draft: its vocabulary is shifted by one column, so its tokens get the random numbers of other tokens."""

    def forward(self, spans: Sequence[Span]) -> npt.NDArray[np.float32]:
        return np.roll(super().forward(spans), 1, axis=1)


@dataclass(frozen=True)
class Sampled:
    """Outputs, one per seed, and the share of seeds for which the first draft token was accepted."""

    outputs: list[list[int]]
    acceptance: float


class Changed:
    """Wrong decoder, which applies `change` to the verified tokens of a right one."""

    def __init__(self, decoder: SpeculativeDecoder, change: Callable[[Verdict], Verdict]) -> None:
        self._decoder, self._change = decoder, change

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        return [self._change(verdict) for verdict in self._decoder.step(turns)]


def sampled(decoder: SpeculativeDecoder | Changed) -> Sampled:
    outputs: list[list[int]] = []
    num_accepted = 0
    for first in range(0, NUM_SEEDS, BATCH):
        params = [replace(ASKED, seed=seed) for seed in range(first, first + BATCH)]
        tokens: list[list[int]] = [[0] for _ in params]
        while short := [slot for slot in range(BATCH) if len(tokens[slot]) <= NUM_POSITIONS]:
            turns = [Turn(i, len(tokens[i]) - 1, list(tokens[i]), params[i], gamma=3, output_start=1) for i in short]
            for slot, verdict in zip(short, decoder.step(turns), strict=True):
                num_accepted += len(tokens[slot]) == 1 and verdict.num_accepted_tokens > 0
                tokens[slot] += verdict.token_ids
        outputs += [each[1 : 1 + NUM_POSITIONS] for each in tokens]
    return Sampled(outputs, num_accepted / NUM_SEEDS)


Pair: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(Ids of the target that the draft has too, the draft's ids for the same tokens)."""


def same_ids(target_size: int, draft_size: int) -> Pair:
    return (np.arange(min(target_size, draft_size)),) * 2


def toy_pair(target_size: int, draft_size: int, pair: Pair | None = None) -> tuple[FloatArray, FloatArray]:
    """Return (logits of a toy target, logits of a draft), which are nearly equal on the ids that both have."""
    rng = np.random.default_rng(1)
    ours, theirs = pair or same_ids(target_size, draft_size)
    target, draft = law.toy_logits(rng, target_size), law.toy_logits(rng, draft_size)
    draft[np.ix_(theirs, theirs)] = target[np.ix_(ours, ours)] + law.toy_logits(rng, len(ours), spread=0.4)
    return target, draft


def promised(target: FloatArray, draft: FloatArray, pair: Pair | None = None, row: int = 0) -> float:
    """Return the probability that draft and target, with shared random numbers, choose the same first token.

    Args:
        target: logits of the next token by the last one; the last token is the target's id 0.
        draft: likewise, in the draft's ids.
        pair: ids of the common tokens; by default both have the same ids.
        row: the draft's id of the last token.
    """
    ours, theirs = pair or same_ids(len(target), len(draft))
    q = np.zeros(len(target))
    q[ours] = law.exact_distribution(draft[row, theirs].tolist(), ASKED)
    return law.shared_noise_match(np.asarray(law.exact_distribution(target[0].tolist(), ASKED)), q)


def within_error(rate: float, expected: float, num_errors: float) -> bool:
    return abs(rate - expected) <= num_errors * math.sqrt(expected * (1.0 - expected) / NUM_SEEDS)


TOY_SIZES = [(NUM_PADDED, NUM_COMMON), (NUM_COMMON, NUM_PADDED)]


@pytest.mark.parametrize(("target_size", "draft_size"), TOY_SIZES)
def test_samples_have_the_targets_law_and_the_draft_its_promise(target_size: int, draft_size: int) -> None:
    target, draft = toy_pair(target_size, draft_size)
    found = sampled(SpeculativeDecoder(SlotDecoder(bigrams(target)), ModelProposer(bigrams(draft))))
    choices = law.choice_table(target.astype(np.float32), ASKED, num_seeds=NUM_SEEDS, num_positions=1 + NUM_POSITIONS)
    assert found.outputs == law.decode([table[1:] for table in choices])  # the first output token has position 1
    assert law.law_p_value(found.outputs, target, ASKED) > ALPHA
    assert within_error(found.acceptance, promised(target, draft), 4.0)


def cut_to_the_drafts_ids(verdict: Verdict) -> Verdict:
    return replace(verdict, token_ids=tuple(min(each, NUM_COMMON - 1) for each in verdict.token_ids))


def reads_as_stand_in(verdict: Verdict) -> Verdict:
    known = [each if each < NUM_COMMON else model_proposer.STAND_IN for each in verdict.token_ids]
    return replace(verdict, token_ids=tuple(known))


@pytest.mark.parametrize("wrong", [cut_to_the_drafts_ids, reads_as_stand_in])
def test_a_wrong_commit_of_what_the_draft_lacks_fails(wrong: Callable[[Verdict], Verdict]) -> None:
    target, draft = toy_pair(NUM_PADDED, NUM_COMMON)
    pair = SpeculativeDecoder(SlotDecoder(bigrams(target)), ModelProposer(bigrams(draft)))
    assert law.law_p_value(sampled(Changed(pair, wrong)).outputs, target, ASKED) < ALPHA_WRONG


def test_a_target_kept_to_the_drafts_ids_fails() -> None:
    target, draft = toy_pair(NUM_PADDED, NUM_COMMON)
    kept = target.copy()
    kept[:, NUM_COMMON:] = -math.inf
    pair = SpeculativeDecoder(SlotDecoder(bigrams(kept)), ModelProposer(bigrams(draft)))
    assert law.law_p_value(sampled(pair).outputs, target, ASKED) < ALPHA_WRONG


@pytest.mark.parametrize("wrong", ["padded in front", "uncut"])
def test_a_wrong_draft_keeps_the_law_but_not_the_promise(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the draft lowers its acceptance, but leaves the distribution of the target's tokens."""
    target, draft = toy_pair(NUM_COMMON, NUM_PADDED)
    kind = PaddedInFront if wrong == "padded in front" else law.Bigrams
    proposer = ModelProposer(kind(draft, num_slots=BATCH, max_length=64))
    if wrong == "uncut":
        monkeypatch.setattr(TokenMap, "carry", lambda _, logits: logits)
    found = sampled(SpeculativeDecoder(_Tolerant(target), proposer))
    assert law.law_p_value(found.outputs, target, ASKED) > ALPHA
    assert not within_error(found.acceptance, promised(target, draft), 8.0)


class _Tolerant(SlotDecoder):
    """Target that drops the rest of a proposal from an id that it lacks; a real target refuses such a proposal."""

    def __init__(self, logits: FloatArray) -> None:
        super().__init__(bigrams(logits))

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        known = [[*itertools.takewhile(lambda each: each < self.vocab_size, turn.proposal)] for turn in turns]
        return super().step([replace(turn, proposal=each) for turn, each in zip(turns, known, strict=True)])
