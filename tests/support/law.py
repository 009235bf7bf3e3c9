"""A toy language model, the speculative loop over it, and the exact distribution that its output must have.

Helpers of the tests of what servers sample. The loop takes every choice from `specdec.inference.sampling`, and lets its
argument `verify` decide how many draft tokens are accepted, over many seeds; the exact distribution follows from the
definitions of the truncations (such as top_p), without either. So the two can disagree, as the wrong variants in
tests/unit/sampling/test_law.py show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc  # type: ignore[import-untyped]

from specdec.inference.model.decoder import Verdict
from specdec.inference.model.slots import Span
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens

FloatArray: TypeAlias = npt.NDArray[np.float64]
Verify: TypeAlias = Callable[[Sequence[int], Sequence[int]], Verdict]
Choices: TypeAlias = list[list[list[int]]]
"""[seed index][position][previous token] -> token; nested lists, because the loop reads single entries."""

NoiseKey: TypeAlias = Callable[[int, int], tuple[int, int]]
"""(seed, position) -> the seed and position that a choice is really made with."""


def both(seed: int, position: int) -> tuple[int, int]:
    """Return the key of the noise, (seed, position); wrong variants leave one of them out."""
    return seed, position


def toy_logits(rng: np.random.Generator, vocab_size: int, spread: float = 1.2) -> FloatArray:
    """Return logits of a first-order Markov model: float64 [vocab_size (previous token), vocab_size]."""
    return rng.normal(scale=spread, size=(vocab_size, vocab_size))


class Bigrams:
    """Slot backend over a toy model: logits depend only on the last token, so slots hold nothing."""

    slot_bytes = 0

    def __init__(self, logits: FloatArray, *, num_slots: int, max_length: int) -> None:
        self.logits, self.vocab_size = logits.astype(np.float32), len(logits)
        self.num_slots, self.max_length = num_slots, max_length

    def forward(self, spans: Sequence[Span]) -> npt.NDArray[np.float32]:
        last = [t for span in spans for t in [*span.token_ids][len(span.token_ids) - span.num_logits :]]
        return self.logits[last]


def choice_table(
    logits: FloatArray, sampling: SamplingParams, *, num_seeds: int, num_positions: int, noise_key: NoiseKey = both
) -> Choices:
    """Return the choices of the bigram model with these logits, as `table[seed][position][previous token]`."""
    vocab_size = len(logits)
    seeded = [replace(sampling, seed=seed) for seed in range(num_seeds)]
    rows = [noise_key(seed, position) for seed in range(num_seeds) for position in range(num_positions)]
    chosen = choose_tokens(
        np.tile(logits, (len(rows), 1)),
        [seeded[seed] for seed, _ in rows for _ in range(vocab_size)],
        [position for _, position in rows for _ in range(vocab_size)],
    )
    table: Choices = np.reshape(chosen, (num_seeds, num_positions, vocab_size)).tolist()
    return table


@dataclass(frozen=True, slots=True)
class Generated:
    """Outputs of the speculative loop, one per seed and of equal length, with counts of draft and accepted tokens."""

    outputs: list[list[int]]
    num_draft_tokens: int
    num_accepted_tokens: int


def decode(target: Choices) -> list[list[int]]:
    """Return one output per seed, decoded by the target alone; the previous token of the first is 0."""
    outputs = []
    for by_position in target:
        output = [0]
        for by_previous in by_position:
            output.append(by_previous[output[-1]])
        outputs.append(output[1:])
    return outputs


def speculate(target: Choices, draft: Choices, *, gamma: int, verify: Verify) -> Generated:
    """Run the speculative loop for each seed: propose up to gamma tokens, and commit what `verify` returns."""
    num_positions = len(target[0])
    outputs, num_draft_tokens, num_accepted_tokens = [], 0, 0
    for by_position, draft_by_position in zip(target, draft, strict=True):
        output = [0]
        while (position := len(output) - 1) < num_positions:
            context = output[-1:]
            for step in range(min(gamma, num_positions - position - 1)):
                context.append(draft_by_position[position + step][context[-1]])
            chosen = [by_position[position + i][previous] for i, previous in enumerate(context)]
            verdict = verify(chosen, context[1:])
            num_draft_tokens += len(context) - 1
            num_accepted_tokens += verdict.num_accepted_tokens
            output.extend(verdict.token_ids)
        outputs.append(output[1 : num_positions + 1])
    return Generated(outputs, num_draft_tokens, num_accepted_tokens)


def exact_distribution(logits: Sequence[float], sampling: SamplingParams) -> FloatArray:
    """Return the distribution of one token by the definitions in SamplingParams; no two logits may tie."""
    if sampling.greedy:
        return np.asarray(np.arange(len(logits)) == np.argmax(logits), dtype=np.float64)
    weights = [math.exp((logit - max(logits)) / sampling.temperature) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda v: -weights[v])[: sampling.top_k or None]
    total = sum(weights[v] for v in ranked)
    kept: list[int] = []
    for v in ranked:
        if sum(weights[w] for w in kept) / total < sampling.top_p:
            kept.append(v)
    kept = [v for v in kept if weights[v] >= sampling.min_p * weights[ranked[0]]]
    total = sum(weights[v] for v in kept)
    return np.array([weights[v] / total if v in kept else 0.0 for v in range(len(logits))])


def exact_pair_law(logits: FloatArray, sampling: SamplingParams, position: int) -> FloatArray:
    """Return the joint distribution of two tokens, from `position` on: float64 [vocab_size, vocab_size]."""
    transition = np.stack([exact_distribution(row.tolist(), sampling) for row in logits])
    marginal: FloatArray = np.linalg.matrix_power(transition, position + 1)[0]
    return np.asarray(marginal[:, None] * transition, dtype=np.float64)


def pair_counts(tokens: npt.NDArray[np.int64], vocab_size: int, position: int) -> FloatArray:
    """Count each pair of tokens at `position` and `position + 1`: float64 [vocab_size, vocab_size]."""
    pairs = tokens[:, position] * vocab_size + tokens[:, position + 1]
    return np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size).astype(np.float64)


def g_test(counts: npt.NDArray[Any], law: npt.NDArray[Any]) -> float:
    """Return the p-value of the G-test that `counts` were drawn from `law`; 0 if an impossible token was counted.

    The smallest cells are pooled until one expects five counts; for fewer, the chi-squared limit is poor.
    """
    expected = np.ravel(law) * np.sum(counts)
    order = np.argsort(expected)
    expected, observed = expected[order], np.ravel(counts).astype(np.float64)[order]
    if np.any(observed[expected == 0.0] > 0.0):
        return 0.0
    pooled = int(max(np.count_nonzero(expected < 5.0), np.searchsorted(np.cumsum(expected), 5.0) + 1))
    expected = np.append(expected[:pooled].sum(), expected[pooled:])
    observed = np.append(observed[:pooled].sum(), observed[pooled:])
    seen = observed > 0.0
    statistic = 2.0 * float(np.sum(observed[seen] * np.log(observed[seen] / expected[seen])))
    return float(chdtrc(len(expected) - 1, max(statistic, 0.0))) if len(expected) > 1 else 1.0


def law_p_value(outputs: Sequence[Sequence[int]], logits: FloatArray, sampling: SamplingParams) -> float:
    """Return the smallest p-value over the pairs of adjacent positions, corrected for their number (Bonferroni)."""
    tokens = np.asarray(outputs)
    p_values = [
        g_test(pair_counts(tokens, len(logits), position), exact_pair_law(logits, sampling, position))
        for position in range(tokens.shape[1] - 1)
    ]
    return min(1.0, min(p_values) * len(p_values))


def total_variation(p: FloatArray, q: FloatArray) -> float:
    return float(np.abs(p - q).sum() / 2.0)


def shared_noise_match(p: FloatArray, q: FloatArray) -> float:
    """Return the probability that samples of p and q, drawn with the same Gumbel noise, are equal.

    exp(-G) is a standard exponential E_v, and v wins on both sides if E_v/p_v and E_v/q_v are both the least: if
    E_w > E_v * max(p_w/p_v, q_w/q_v) for every other w. Hence the sum over v of 1 / sum over w of that maximum.
    """
    common = np.flatnonzero((p > 0.0) & (q > 0.0))
    return sum(1.0 / float(np.maximum(p / p[v], q / q[v]).sum()) for v in common)
