"""Speculative decoding gives exactly the target's distribution of outputs, and does not depend on the draft.

Right variants of verification must pass a G-test, and plausible mistakes must fail it. Tokens are chosen by noise:
random numbers that follow from seed, position and token id alone. Seeds are fixed, so results do not vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import takewhile

import numpy as np
import pytest

from specdec.inference.model.decoder import Verdict
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens
from specdec.inference.speculation.verify import verify
from tests.support import law

VOCAB_SIZE = 5
NUM_SEEDS = 3000
NUM_POSITIONS = 5
NUM_COMPARED = 200
"""Number of seeds whose tokens are compared for each draft and gamma; tests of the distribution use all seeds."""

GAMMAS = (0, 1, 2, 4)
TARGET = law.toy_logits(np.random.default_rng(1), VOCAB_SIZE)
DRAFTS = {
    "same": TARGET,
    "near": TARGET + law.toy_logits(np.random.default_rng(2), VOCAB_SIZE, spread=0.4),
    "far": law.toy_logits(np.random.default_rng(3), VOCAB_SIZE),
}
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.4),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1),
]
ASKED = SETTINGS[2]
# Every law that is tested counts once: the outputs do not depend on draft and gamma.
ALPHA = 0.01 / len(SETTINGS)
# A mistake has to fail by a margin, so that no change of seeds or compiler turns its verdict.
ALPHA_WRONG = ALPHA * 1e-6


def label(sampling: SamplingParams) -> str:
    """Return a test id: the parameters that differ from their defaults."""
    values = asdict(sampling)
    return " ".join(f"{name}={value}" for name, value in values.items() if value != asdict(SamplingParams())[name])


@cache
def choices(model: str, sampling: SamplingParams) -> law.Choices:
    logits = TARGET if model == "target" else DRAFTS[model]
    return law.choice_table(logits, sampling, num_seeds=NUM_SEEDS, num_positions=NUM_POSITIONS)


def target_choices(sampling: SamplingParams = ASKED, noise_key: law.NoiseKey = law.both) -> law.Choices:
    return law.choice_table(TARGET, sampling, num_seeds=NUM_SEEDS, num_positions=NUM_POSITIONS, noise_key=noise_key)


@pytest.mark.parametrize("sampling", SETTINGS, ids=label)
def test_speculation_has_the_targets_law_and_its_very_tokens(sampling: SamplingParams) -> None:
    """With the same random numbers for draft and target, speculation gives, for each seed, the target's own tokens."""
    target = choices("target", sampling)
    alone = law.decode(target)
    assert law.law_p_value(alone, TARGET, sampling) > ALPHA
    for draft in DRAFTS:
        for gamma in GAMMAS:
            drafted = choices(draft, sampling)[:NUM_COMPARED]
            generated = law.speculate(target[:NUM_COMPARED], drafted, gamma=gamma, verify=verify)
            assert generated.outputs == alone[:NUM_COMPARED]


@pytest.mark.parametrize(
    "drafted",
    [
        pytest.param(SamplingParams(temperature=0.0), id="greedy draft"),
        pytest.param(SamplingParams(temperature=3.0, top_k=2), id="other parameters"),
    ],
)
def test_a_draft_that_samples_otherwise_changes_nothing(drafted: SamplingParams) -> None:
    """A draft that samples with other parameters lowers the acceptance, and changes no token."""
    target, near = choices("target", ASKED), choices("near", drafted)
    for gamma in GAMMAS:
        for proposed in (near, near[::-1]):  # the second has the noise of other seeds
            generated = law.speculate(target, proposed, gamma=gamma, verify=verify)
            assert generated.outputs == law.decode(target)


@pytest.mark.parametrize("sampling", SETTINGS, ids=label)
def test_a_draft_equal_to_the_target_is_always_accepted(sampling: SamplingParams) -> None:
    """A draft with the target's own logits and random numbers has all of its tokens accepted."""
    generated = law.speculate(choices("target", sampling), choices("same", sampling), gamma=4, verify=verify)
    assert generated.num_accepted_tokens == generated.num_draft_tokens > 0


def compares_with_the_next_row(chosen: Sequence[int], proposal: Sequence[int]) -> Verdict:
    accepted = list(takewhile(lambda i: chosen[i + 1] == proposal[i], range(len(proposal))))
    token_ids = (*proposal[: len(accepted)], chosen[len(accepted)])
    return replace(verify(chosen, proposal), token_ids=token_ids, num_accepted_tokens=len(accepted))


def reads_rows_one_too_late(chosen: Sequence[int], proposal: Sequence[int]) -> Verdict:
    return verify([*chosen[1:], chosen[-1]], proposal)


def reads_rows_one_too_early(chosen: Sequence[int], proposal: Sequence[int]) -> Verdict:
    return verify([chosen[0], *chosen[:-1]], proposal)


def corrects_from_the_next_row(chosen: Sequence[int], proposal: Sequence[int]) -> Verdict:
    right = verify(chosen, proposal)
    row = min(right.num_accepted_tokens + 1, len(proposal))
    return replace(right, token_ids=(*right.token_ids[:-1], chosen[row]))


def accepts_always(chosen: Sequence[int], proposal: Sequence[int]) -> Verdict:
    return replace(verify(chosen, proposal), token_ids=(*proposal, chosen[-1]), num_accepted_tokens=len(proposal))


def goes_on_after_a_mismatch(chosen: Sequence[int], proposal: Sequence[int]) -> Verdict:
    return replace(verify(chosen, proposal), token_ids=tuple(chosen), num_accepted_tokens=len(proposal))


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize(
    "wrong",
    [
        compares_with_the_next_row,
        reads_rows_one_too_late,
        reads_rows_one_too_early,
        corrects_from_the_next_row,
        accepts_always,
        goes_on_after_a_mismatch,
    ],
)
def test_wrong_verification_fails(wrong: law.Verify, gamma: int) -> None:
    """Wrong verification fails the G-test with a draft unlike its target, and changes tokens even with a similar draft.

    With a draft much like its target, some mistakes do not show in the distribution, but in the tokens.
    """
    target = choices("target", ASKED)
    generated = law.speculate(target, choices("far", ASKED), gamma=gamma, verify=wrong)
    assert law.law_p_value(generated.outputs, TARGET, ASKED) < ALPHA_WRONG
    generated = law.speculate(target, choices("near", ASKED), gamma=gamma, verify=wrong)
    assert generated.outputs != law.decode(target)


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize(
    "noise_key",
    [
        pytest.param(lambda seed, position: (seed, 0), id="without position"),
        pytest.param(lambda seed, position: (0, position), id="without seed"),
        pytest.param(lambda seed, position: (seed, position // 2), id="two positions share"),
        pytest.param(lambda seed, position: (seed // 20, position), id="twenty seeds share"),
    ],
)
def test_wrongly_keyed_noise_fails(noise_key: law.NoiseKey, gamma: int) -> None:
    """Noise (random numbers that choose tokens) fails the G-test if it ignores a part of the seed or of the position.

    Each single token then has the right distribution, but pairs of tokens, over positions or seeds, do not.
    """
    generated = law.speculate(target_choices(noise_key=noise_key), choices("near", ASKED), gamma=gamma, verify=verify)
    assert law.law_p_value(generated.outputs, TARGET, ASKED) < ALPHA_WRONG


@pytest.mark.parametrize(
    "used",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.4),
        SamplingParams(temperature=1.0, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.0, min_p=0.1),
    ],
    ids=label,
)
def test_verification_with_other_parameters_than_asked_fails(used: SamplingParams) -> None:
    """If verification uses other sampling parameters than the request's, its outputs fail the G-test."""
    generated = law.speculate(choices("target", used), choices("near", ASKED), gamma=3, verify=verify)
    assert law.law_p_value(generated.outputs, TARGET, ASKED) < ALPHA_WRONG


def test_acceptance_is_what_shared_noise_promises() -> None:
    """Draft tokens are accepted as often as theory says for shared Gumbel random numbers (arXiv 2408.07978)."""
    rng = np.random.default_rng(4)
    num_pairs, num_seeds = 16, 3000
    sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(num_seeds)]
    for pair in range(num_pairs):
        vocab_size = int(rng.integers(2, 12))
        logits = rng.normal(scale=rng.uniform(0.2, 3.0), size=(2, vocab_size))
        chosen = [choose_tokens(np.tile(row, (num_seeds, 1)), sampling, [pair] * num_seeds) for row in logits]
        rate = float(np.mean(np.equal(chosen[0], chosen[1])))
        p, q = (law.exact_distribution(row.tolist(), sampling[0]) for row in logits)
        tv, expected = law.total_variation(p, q), law.shared_noise_match(p, q)
        assert (1.0 - tv) / (1.0 + tv) - 1e-12 <= expected <= 1.0 - tv + 1e-12
        # 4.5 standard errors: 1e-4 for all pairs together.
        error = 4.5 * (expected * (1.0 - expected) / num_seeds) ** 0.5
        assert abs(rate - expected) <= error
        assert rate >= (1.0 - tv) / (1.0 + tv) - error
