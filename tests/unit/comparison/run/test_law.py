"""`specdec law` tests whether a server's samples follow the probabilities that it reports: right samplers alone pass.

Wrong samplers fail within as many tokens as the test says that it needs. Each sampler here decodes speculatively with
two toy models, and reports the target's probabilities as a server does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from specdec.comparison.run.law import ALPHA, NUM_RANKS, NUM_TOKENS, SHIFT, Counts, num_needed, p_value

Law: TypeAlias = npt.NDArray[np.float64]
Rule: TypeAlias = Callable[[Law, Law, np.random.Generator], tuple[int, bool]]
"""Function of target's and draft's probabilities and a random generator; returns (token, whether it is the draft's)."""
pytestmark = pytest.mark.release
SIZE = 7
"""Number of tokens in the toy vocabulary: so few that a wrong sampler is wrong by some percent at each position."""


def laws(seed: int) -> tuple[Law, Law]:
    """Return (target, draft), which often differ; row i of each [SIZE, SIZE] is the law of the token after token i."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=1.4, size=(SIZE, SIZE))
    target, draft = (np.exp(each) for each in (logits, rng.normal(scale=1.4, size=logits.shape)))
    return target / target.sum(-1, keepdims=True), draft / draft.sum(-1, keepdims=True)


def drawn(law: Law, rng: np.random.Generator) -> int:
    return min(int(np.searchsorted(np.cumsum(law) / law.sum(), rng.random(), side="right")), SIZE - 1)


def rejection(p: Law, q: Law, rng: np.random.Generator, residual: Callable[[Law, Law], Law]) -> tuple[int, bool]:
    token = drawn(q, rng)
    if rng.random() * q[token] <= p[token]:
        return token, True
    return drawn(residual(p, q), rng), False


def right(p: Law, q: Law, rng: np.random.Generator) -> tuple[int, bool]:
    return rejection(p, q, rng, lambda p, q: np.maximum(p - q, 0.0))


def coupled(p: Law, q: Law, rng: np.random.Generator) -> tuple[int, bool]:
    """Draw target's and draft's tokens with the same Gumbel noise, and take the target's: this project's rule."""
    noise = rng.gumbel(size=SIZE)
    token = int(np.argmax(np.log(p) + noise))
    return token, token == int(np.argmax(np.log(q) + noise))


def residual_from_target(p: Law, q: Law, rng: np.random.Generator) -> tuple[int, bool]:
    return rejection(p, q, rng, lambda p, q: p)


def residual_of_the_best(p: Law, q: Law, rng: np.random.Generator) -> tuple[int, bool]:
    """Draw by rejection sampling, but after a rejection only from the target's best four tokens: wrong."""
    return rejection(p, q, rng, lambda p, q: np.where(p >= np.sort(p)[-4], np.maximum(p - q, 0.0), 0.0) + 1e-12 * p)


def one_noise_under_a_ratio(p: Law, q: Law, rng: np.random.Generator) -> tuple[int, bool]:
    """Draw the draft's token and, if rejected, its replacement with the same Gumbel noise: wrong, as vLLM once did."""
    noise = rng.gumbel(size=SIZE)
    token = int(np.argmax(np.log(q) + noise))
    if rng.random() * q[token] <= p[token]:
        return token, True
    return int(np.argmax(np.log(np.maximum(p - q, 1e-300)) + noise)), False


def answers(rule: Rule, seed: int, num_tokens: int, *, off_by: int = 0) -> Counts:
    """Return counts of a server that samples by `rule`; `off_by` 1 wrongly uses the target of one position before."""
    target, draft = laws(seed)
    rng, counts = np.random.default_rng(seed), Counts()
    for number in range(math.ceil(num_tokens / (NUM_TOKENS - 1))):
        tokens = [number % 3]  # the prompt
        columns: list[tuple[str, float, dict[str, float]]] = []
        for _ in range(NUM_TOKENS):
            p = target[tokens[-1]]
            token, _ = rule(target[tokens[max(0, len(tokens) - 1 - off_by)]], draft[tokens[-1]], rng)
            best = {str(each): math.log(p[each]) for each in np.argsort(p)[-NUM_RANKS:]}
            columns.append((str(token), math.log(p[token]), {**best, str(token): math.log(p[token])}))
            tokens.append(token)
        counts.take(tokens[0], answer_of(columns))
    return counts


def answer_of(columns: list[tuple[str, float, dict[str, float]]]) -> dict[str, Any]:
    tokens, logprobs, top = map(list, zip(*columns, strict=True))
    return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}}]}


@pytest.mark.parametrize("rule", [right, coupled])
def test_a_right_sampler_passes(rule: Rule) -> None:
    """None of thirty servers with a right sampler fails, and their p-values are spread evenly around one half."""
    values = [p_value(answers(rule, seed, 1400)) for seed in range(30)]
    assert min(values) >= ALPHA
    assert 0.25 < float(np.median(values)) < 0.75
    assert sum(value < 0.1 for value in values) <= 8


@pytest.mark.parametrize(
    ("rule", "off_by"),
    [
        (residual_from_target, 0),
        (residual_of_the_best, 0),
        (one_noise_under_a_ratio, 0),
        (right, 1),
        (coupled, 1),
    ],
)
def test_a_wrong_sampler_is_found_within_the_tokens_that_are_named(rule: Rule, off_by: int) -> None:
    assert p_value(answers(rule, 3, num_needed(ALPHA, SHIFT), off_by=off_by)) < ALPHA


def test_a_right_sampler_passes_with_the_tokens_that_are_named() -> None:
    assert p_value(answers(coupled, 3, num_needed(ALPHA, SHIFT))) >= ALPHA


def test_tokens_whose_texts_may_be_one_are_left_out() -> None:
    counts = Counts()
    best = {"a": -0.5, "b": -2.0, "c": -3.0, "d": -4.0, "\ufffd": -5.0}
    counts.take("a prompt", answer_of([("a", -0.5, best), ("a", -0.5, best), ("b", -2.0, best)]))
    assert counts.tokens == []
