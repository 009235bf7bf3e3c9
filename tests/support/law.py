"""A toy language model, speculative decoding over it, and the exact distribution that its output must have.

Used by tests of what servers sample. Speculative decoding runs for many seeds; it takes every choice from
`specdec.inference.sampling`, and how many draft tokens are accepted from an argument. The exact distribution is
computed from the definitions of temperature, top_k, top_p and min_p, without that code. So a comparison of the two
finds mistakes; tests/unit/sampling/test_law.py shows that it does, with wrong variants.
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
"""The chosen token, by [seed index][position][previous token]; nested lists, since single entries are read."""

NoiseKey: TypeAlias = Callable[[int, int], tuple[int, int]]
"""Function from (seed, position) to the seed and position whose random numbers are used; wrong variants change them."""


def both(seed: int, position: int) -> tuple[int, int]:
    """Return (seed, position), as right code takes its random numbers from both; wrong variants leave one out."""
    return seed, position


def toy_logits(rng: np.random.Generator, vocab_size: int, spread: float = 1.2) -> FloatArray:
    """Return logits of a first-order Markov model: float64 [vocab_size (previous token), vocab_size]."""
    return rng.normal(scale=spread, size=(vocab_size, vocab_size))


class Bigrams:
    """Slot backend whose model looks only at the last token, so that it needs no KV cache; its logits are a table."""

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
    """Return the token that is chosen after each previous token, as `table[seed][position][previous token]`.

    Row t of `logits` has the model's logits after token t. The seeds are 0 to `num_seeds` - 1.
    """
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
    """Outputs of speculative decoding, one per seed and of equal length, with counts of draft and accepted tokens."""

    outputs: list[list[int]]
    num_draft_tokens: int
    num_accepted_tokens: int


def decode(target: Choices) -> list[list[int]]:
    """Return one output per seed, decoded by the target alone; the first token of each is chosen after token 0."""
    outputs = []
    for by_position in target:
        output = [0]
        for by_previous in by_position:
            output.append(by_previous[output[-1]])
        outputs.append(output[1:])
    return outputs


def speculate(target: Choices, draft: Choices, *, gamma: int, verify: Verify) -> Generated:
    """Decode speculatively for each seed, starting after token 0; return the outputs.

    In each round the draft proposes up to `gamma` tokens, and `verify` gets the target's choices and these tokens, and
    returns the tokens to append.
    """
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
    """Return the exact probabilities of one sampled token, computed from the definitions in SamplingParams.

    No two logits may be equal.
    """
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
    """Return the joint probabilities of the tokens at `position` and `position + 1`: float64 [vocab_size, vocab_size].

    Row t of `logits` has the toy model's logits after token t; the output starts after token 0.
    """
    transition = np.stack([exact_distribution(row.tolist(), sampling) for row in logits])
    marginal: FloatArray = np.linalg.matrix_power(transition, position + 1)[0]
    return np.asarray(marginal[:, None] * transition, dtype=np.float64)


def pair_counts(tokens: npt.NDArray[np.int64], vocab_size: int, position: int) -> FloatArray:
    """Return how often each pair of tokens is at `position` and `position + 1`: float64 [vocab_size, vocab_size].

    Rows of the result are the first token, columns the second; `tokens` is [num_outputs, num_positions].
    """
    pairs = tokens[:, position] * vocab_size + tokens[:, position + 1]
    return np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size).astype(np.float64)


def g_test(counts: npt.NDArray[Any], law: npt.NDArray[Any]) -> float:
    """Return the p-value of a G-test that `counts` were drawn from the probabilities `law`.

    It is 0 if a token of probability 0 was counted. The least probable entries are pooled until each expects at least
    five counts; with fewer, the chi-squared approximation is poor.
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
    """Return a p-value for the hypothesis that the outputs were sampled from the toy model's exact distribution.

    It is the smallest one over all pairs of adjacent positions, times the number of pairs (Bonferroni), at most 1.
    """
    tokens = np.asarray(outputs)
    p_values = [
        g_test(pair_counts(tokens, len(logits), position), exact_pair_law(logits, sampling, position))
        for position in range(tokens.shape[1] - 1)
    ]
    return min(1.0, min(p_values) * len(p_values))


def total_variation(p: FloatArray, q: FloatArray) -> float:
    return float(np.abs(p - q).sum() / 2.0)


def shared_noise_match(p: FloatArray, q: FloatArray) -> float:
    """Return the probability that one sample of p and one of q, drawn with the same Gumbel numbers G_v, are equal.

    E_v = exp(-G_v) is a standard exponential, and p's sample is the v with the least E_v/p_v. Token v is the sample of
    both if E_w > E_v * max(p_w/p_v, q_w/q_v) for every other w, which has probability 1 / sum over w of that maximum.
    The result is the sum over v.
    """
    common = np.flatnonzero((p > 0.0) & (q > 0.0))
    return sum(1.0 / float(np.maximum(p / p[v], q / q[v]).sum()) for v in common)
