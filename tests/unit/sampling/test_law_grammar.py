"""Output under a grammar has exactly the distribution of logits masked before temperature and truncation.

The toy grammar here allows some followers of each token. As in test_law.py, wrong variants must fail the G-test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens
from specdec.inference.sampling.noise import gumbel_noise, noise_keys
from specdec.inference.sampling.penalties import NONE_BEFORE
from specdec.inference.sampling.truncation import process_logits
from specdec.inference.speculation.verify import verify
from tests.support import law

VOCAB_SIZE = 6
NUM_SEEDS = 3000
NUM_POSITIONS = 5
TARGET = law.toy_logits(np.random.default_rng(4), VOCAB_SIZE)
DRAFT = TARGET + law.toy_logits(np.random.default_rng(5), VOCAB_SIZE, spread=0.5)
ALLOWED = np.array([[(u * u + v) % 3 != 0 for v in range(VOCAB_SIZE)] for u in range(VOCAB_SIZE)])
MASKED = np.where(ALLOWED, TARGET, -np.inf)
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.15),
]
ALPHA = 0.01 / len(SETTINGS)
ALPHA_WRONG = ALPHA * 1e-6

Rows = Callable[[SamplingParams, list[SamplingParams], list[int], list[int]], list[int]]
"""Function that chooses a token per row, from (parameters, and by row: those with its seed, position, last token)."""


def bits(row: np.ndarray) -> bytes:
    return np.packbits(row, bitorder="little").tobytes() + bytes(3)  # masks are whole words


def masked(logits: law.FloatArray, allowed: np.ndarray = ALLOWED) -> Rows:
    """Return a function that chooses from the row of `logits` for the last token, where that of `allowed` is True."""
    behind = [replace(NONE_BEFORE, allowed=bits(row)) for row in allowed]

    def choose(_: SamplingParams, sampling: list[SamplingParams], at: list[int], previous: list[int]) -> list[int]:
        return choose_tokens(logits[previous], sampling, at, [behind[u] for u in previous])

    return choose


def masked_after_truncation(
    _: SamplingParams, sampling: list[SamplingParams], at: list[int], previous: list[int]
) -> list[int]:
    """Choose tokens wrongly: mask after truncation, and if no token is left in a row, from all tokens allowed there."""
    scores = np.where(ALLOWED[previous], process_logits(TARGET[previous], sampling), -np.inf)
    nothing = ~np.isfinite(scores).any(axis=-1)
    scores[nothing] = MASKED[previous][nothing]
    keys = np.asarray(noise_keys([params.seed for params in sampling], at), dtype=np.int64)
    return np.argmax(scores + gumbel_noise(keys[:, None], np.arange(VOCAB_SIZE)[None, :]), axis=-1).tolist()  # type: ignore[no-any-return]


def table(choose: Rows, sampling: SamplingParams) -> law.Choices:
    rows = [(s, t, u) for s in range(NUM_SEEDS) for t in range(NUM_POSITIONS) for u in range(VOCAB_SIZE)]
    seeded = [replace(sampling, seed=seed) for seed in range(NUM_SEEDS)]
    chosen = choose(sampling, [seeded[s] for s, _, _ in rows], [t for _, t, _ in rows], [u for _, _, u in rows])
    return np.reshape(chosen, (NUM_SEEDS, NUM_POSITIONS, VOCAB_SIZE)).tolist()


@cache
def target_table(sampling: SamplingParams) -> law.Choices:
    return table(masked(TARGET), sampling)


@cache
def draft_table(sampling: SamplingParams, grammared: bool) -> law.Choices:
    return table(masked(DRAFT, ALLOWED if grammared else np.ones_like(ALLOWED)), sampling)


def p_value(outputs: list[list[int]], sampling: SamplingParams) -> float:
    return law.law_p_value(outputs, MASKED, sampling)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("grammared", [True, False], ids=["draft with grammar", "draft without"])
def test_the_law_is_that_of_masked_logits(sampling: SamplingParams, grammared: bool) -> None:
    target = target_table(sampling)
    outputs = law.speculate(target, draft_table(sampling, grammared), gamma=3, verify=verify).outputs
    assert outputs == law.decode(target)
    assert p_value(outputs, sampling) > ALPHA


def test_a_grammared_draft_is_accepted_more_often() -> None:
    rates = []
    for grammared in (True, False):
        draft = draft_table(SETTINGS[1], grammared)
        run = law.speculate(target_table(SETTINGS[1]), draft, gamma=3, verify=verify)
        rates.append(run.num_accepted_tokens / run.num_draft_tokens)
    assert rates[0] > rates[1] + 0.1


WRONG: dict[str, tuple[Rows, SamplingParams]] = {
    "no mask": (masked(TARGET, np.ones_like(ALLOWED)), SETTINGS[1]),
    "mask of another state": (masked(TARGET, np.roll(ALLOWED, 1, axis=0)), SETTINGS[1]),
    "mask after top_k": (masked_after_truncation, SETTINGS[2]),
    "mask after top_p": (masked_after_truncation, SETTINGS[3]),
    "mask after min_p": (masked_after_truncation, SETTINGS[4]),
}


@pytest.mark.parametrize(("choose", "sampling"), WRONG.values(), ids=WRONG)
def test_mistakes_fail(choose: Rows, sampling: SamplingParams) -> None:
    assert p_value(law.decode(table(choose, sampling)), sampling) < ALPHA_WRONG


def test_a_late_mask_is_right_without_truncation() -> None:
    """Without truncation (top_k, top_p, min_p), a mask applied too late does no harm.

    So if `masked_after_truncation` fails in other tests, the cause is the wrong order, and nothing else.
    """
    assert table(masked_after_truncation, SETTINGS[1]) == target_table(SETTINGS[1])
