"""Biases and penalties act as in Transformers and vLLM, also on each draft token of a proposal."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from specdec.inference.errors import InvalidRequestError
from specdec.inference.model.decoder import Turn
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.sampling.choice import choose_tokens
from specdec.inference.sampling.penalties import NONE_BEFORE, TokensBefore, adjust_logits, rows_before
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.tokens import Tally, TokenView
from tests.support.faults import strikes
from tests.support.law import Bigrams

VOCAB_SIZE = 12
relaxed = settings(deadline=None, max_examples=60)

token_ids = st.integers(0, VOCAB_SIZE - 1)
sequences = st.lists(token_ids, min_size=1, max_size=20)
biases = st.dictionaries(token_ids, st.floats(-100.0, 100.0), max_size=5).map(lambda d: tuple(sorted(d.items())))
penalizing = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.1, 5.0)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    logit_bias=biases,
)

FloatArray = npt.NDArray[np.float64]


def random_logits(seed: int, num_rows: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(scale=3.0, size=(num_rows, VOCAB_SIZE)).astype(np.float32)


def by_the_book(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Return one row's logits with bias and penalties, computed token by token from their definitions."""
    bias = dict(params.logit_bias)
    scores = []
    for token_id, logit in enumerate(map(float, logits)):
        score = logit + bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * output.count(token_id)
        score -= params.presence_penalty if token_id in output else 0.0
        scores.append(score)
    return scores


def adjusted(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]
) -> FloatArray:
    scores: FloatArray = adjust_logits(logits, [params], [TokensBefore.of([*prompt, *output], len(prompt))])
    return scores


@relaxed
@given(st.integers(0, 2**32), penalizing, sequences, st.lists(token_ids, max_size=20))
def test_every_score_is_by_the_book(seed: int, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
    logits = random_logits(seed, 1)
    np.testing.assert_array_equal(
        adjusted(logits, params, prompt, output)[0], by_the_book(logits[0], params, prompt, output)
    )


@relaxed
@given(st.integers(0, 2**32), st.floats(0.1, 5.0), sequences, st.lists(token_ids, max_size=9))
def test_repetition_penalty_is_transformers(seed: int, penalty: float, prompt: list[int], output: list[int]) -> None:
    logits = random_logits(seed, 1)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([[*prompt, *output]]), torch.from_numpy(logits).double())
    params = SamplingParams(repetition_penalty=penalty)
    np.testing.assert_array_equal(adjusted(logits, params, prompt, output), expected.numpy())


@relaxed
@given(st.integers(0, 2**32), biases.filter(bool))
def test_logit_bias_is_transformers_sequence_bias(seed: int, bias: tuple[tuple[int, float], ...]) -> None:
    logits = random_logits(seed, 1)
    processor = SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias})
    expected = processor(torch.tensor([[0]]), torch.from_numpy(logits).double())
    scores = adjusted(logits, SamplingParams(logit_bias=bias), [0], [])
    np.testing.assert_allclose(scores, expected.numpy(), rtol=0, atol=1e-5)  # theirs keeps the bias in float32


@relaxed
@given(st.integers(0, 2**32), st.lists(st.tuples(penalizing, sequences, st.integers(0, 9)), min_size=1, max_size=5))
def test_numpy_and_torch_rows_are_independent(seed: int, rows: list[tuple[SamplingParams, list[int], int]]) -> None:
    """Penalties give equal bits in numpy and torch, alone and in a batch, and leave the given logits unchanged."""
    logits, sampling = random_logits(seed, len(rows)), [params for params, _, _ in rows]
    before = [TokensBefore.of(sequence, start) for _, sequence, start in rows]
    kept = logits.copy()
    by_numpy = adjust_logits(logits, sampling, before)
    by_torch = adjust_logits(torch.from_numpy(logits), sampling, before)
    assert by_numpy.tobytes() == by_torch.numpy().tobytes()
    for i in range(len(rows)):
        alone = adjust_logits(logits[i : i + 1], sampling[i : i + 1], before[i : i + 1])
        assert alone.tobytes() == by_numpy[i : i + 1].tobytes()
    np.testing.assert_array_equal(logits, kept)


@relaxed
@given(sequences, st.lists(token_ids, max_size=6), st.integers(0, 20))
def test_each_row_sees_the_draft_tokens_before(committed: list[int], proposal: list[int], output_start: int) -> None:
    turn = Turn(0, 0, committed, SamplingParams(presence_penalty=1.0), output_start=output_start)
    rows = rows_before(turn, proposal)
    for i, row in enumerate(rows):
        output = [*committed[output_start:], *proposal[:i]]
        assert counted(row) == (Counter(output), set(committed[:output_start]))


def counted(row: TokensBefore) -> tuple[Counter[int], set[int]]:
    """Return (how often each id is in a row's output, the set of ids in the row's prompt)."""
    counts = Counter(dict(zip(row.token_ids.tolist(), row.counts.tolist(), strict=True)))
    return +counts, set(row.token_ids[row.in_prompt].tolist())


@relaxed
@given(
    sequences, st.lists(st.tuples(st.lists(token_ids, max_size=4), st.lists(token_ids, max_size=3), st.integers(1, 60)))
)
def test_incremental_counts_equal_a_full_count(log: list[int], steps: list[tuple[list[int], list[int], int]]) -> None:
    """Counts of tokens that are updated as the output grows equal a count of the whole output, also after an error.

    Regression: tokens were marked as counted before they were, so if an error came between, they were never counted.
    """
    tally, output_start = Tally(len(log)), len(log)
    for committed, drafts, number in steps:
        log += committed
        view = TokenView(log, tail=drafts)
        strikes(partial(TokensBefore.of, view, output_start, tally), number, ("specdec.inference.tokens",))
        row = TokensBefore.of(view, output_start, tally)
        assert counted(row) == counted(TokensBefore.of([*log, *drafts], output_start))


def decoded(
    decoder: SlotDecoder, params: SamplingParams, prompt: list[int], num_tokens: int, rng: random.Random | None
) -> list[int]:
    """Return output tokens, decoded one per pass, or if `rng` is given, with proposals that are mostly right."""
    truth = decoded(decoder, params, prompt, num_tokens + 8, None) if rng else []
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + num_tokens:
        ahead = truth[len(token_ids) - len(prompt) :][:4]
        proposal = [t if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE) for t in ahead] if rng else []
        turn = Turn(0, 0, token_ids, params, proposal, output_start=len(prompt))
        (verdict,) = decoder.step([turn])
        token_ids = [*token_ids, *verdict.token_ids]
    return token_ids[len(prompt) :][:num_tokens]


@relaxed
@given(st.integers(0, 2**32), penalizing, sequences)
def test_speculation_does_not_change_penalized_output(seed: int, params: SamplingParams, prompt: list[int]) -> None:
    """With penalties, the output is that of the target without draft tokens, whatever is proposed."""
    decoder = SlotDecoder(Bigrams(random_logits(seed, VOCAB_SIZE).astype(np.float64), num_slots=4, max_length=1000))
    alone = decoded(decoder, params, prompt, 16, None)
    assert decoded(decoder, params, prompt, 16, random.Random(seed)) == alone


def test_a_resumed_output_begins_where_it_did() -> None:
    request = GenerationRequest((1, 2, 3, 4, 5))
    assert request.output_start == 5
    assert replace(request, num_committed_tokens=2).output_start == 3


def test_penalties_without_the_tokens_before_are_refused() -> None:
    """Penalties without the row's earlier tokens are refused, since they would have no effect."""
    with pytest.raises(ValueError, match="look back"):
        choose_tokens(random_logits(0, 1), [SamplingParams(presence_penalty=1.0)], [3])
    assert choose_tokens(random_logits(0, 1), [SamplingParams(logit_bias=((7, 100.0),))], [3]) == [7]
    assert counted(TokensBefore.of([], 0)) == counted(NONE_BEFORE) == (Counter(), set())


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"logit_bias": ((3, 101.0),)}, "[-100, 100]"),
        ({"logit_bias": ((3, float("nan")),)}, "[-100, 100]"),
        ({"logit_bias": ((-3, 1.0),)}, "below 0"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "twice"),
        ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "1024"),
    ],
    ids=str,
)
def test_values_outside_their_range_are_refused(fields: dict[str, float], limit: str) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert limit in str(caught.value)
