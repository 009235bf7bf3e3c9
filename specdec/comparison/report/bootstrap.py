"""Ratios of times with intervals of confidence, by bootstrap of the mean logarithm of ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
MAX_DRAWS = 4_000_000
"""Most random draws for one interval; larger samples are resampled less often, but at least 1,000 times."""
MIN_PAIRS = 3

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of one measurement's values to another's, as a geometric mean, with its confidence interval.

    Attributes:
        estimate: the ratio.
        low, high: ends of the interval; 0 and infinity if `num_pairs` is below `MIN_PAIRS`.
        num_pairs: number of pairs of values; for values that have no pairs, the degrees of freedom plus 1.
    """

    estimate: float
    low: float
    high: float
    num_pairs: int

    @property
    def differs(self) -> bool:
        """Return whether the interval excludes 1."""
        return self.low > 1.0 or self.high < 1.0

    @property
    def doubt(self) -> str:
        """Reason why the ratio proves no difference; empty if it proves one."""
        return "too few to tell" if self.num_pairs < MIN_PAIRS else "" if self.differs else "no difference"

    def __str__(self) -> str:
        interval = "" if self.num_pairs < MIN_PAIRS else f" ({self.low:.2f}-{self.high:.2f})"
        return ", ".join(filter(None, (f"{self.estimate:.2f}{interval}", self.doubt)))


def paired_ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Return the geometric mean of the ratios after / before of all pairs of values, with its interval.

    The two measurements were interleaved, so drift (heat, other processes) affects both values of a pair alike.

    Args:
        before, after: values above 0; those at one index are a pair, of the same prompt and the same run.
    """
    logs = np.log(np.asarray(after)) - np.log(np.asarray(before))
    return _ratio(float(logs.mean()), [logs], len(logs), CONFIDENCE)


def stratified_ratio(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], *, confidence: float = CONFIDENCE
) -> Ratio:
    """Return the ratio after / before of two measurements that were not interleaved, with its interval.

    It is the geometric mean over prompts; for each prompt it is the geometric mean of the values after over that of the
    values before. For the interval, the runs of each measurement are resampled separately.

    Args:
        before, after: values above 0, by prompt; only prompts that both have count, and there must be at least one.
        confidence: probability that the interval contains the ratio.
    """
    both = sorted(before.keys() & after.keys())
    old, new = ([np.log(np.asarray(side[key], dtype=float)) for key in both] for side in (before, after))
    estimate = float(np.mean([after.mean() - before.mean() for before, after in zip(old, new, strict=True)]))
    old_rest, new_rest = (np.concatenate([values - values.mean() for values in side]) for side in (old, new))
    # Each prompt's mean was taken from its own runs: one degree of freedom each, on each side.
    num_free = [len(rest) - len(both) for rest in (old_rest, new_rest)]
    wider = [math.sqrt(len(rest) / max(1, free)) for rest, free in zip((old_rest, new_rest), num_free, strict=True)]
    count = sum(num_free) + 1 if min(num_free) > 0 else 0
    return _ratio(estimate, [-wider[0] * old_rest, wider[1] * new_rest], count, confidence)


def _ratio(estimate: float, samples: Sequence[Vector], num_pairs: int, confidence: float) -> Ratio:
    """Return the ratio, with percentiles of resampled sums as its interval, widened for small samples.

    Args:
        estimate: logarithm of the ratio.
        samples: groups of values. The sum of their means varies as `estimate` does, so it is resampled instead.
        num_pairs: number of pairs of values; below `MIN_PAIRS` the interval is from 0 to infinity.
        confidence: probability that the interval contains the ratio.
    """
    if num_pairs < MIN_PAIRS:
        return Ratio(math.exp(estimate), 0.0, math.inf, num_pairs)
    tail = (1 - confidence) / 2
    middle = sum(float(values.mean()) for values in samples)
    distances = (np.quantile(_resampled(samples), (tail, 1 - tail)) - middle) * _widening(num_pairs, tail)
    low, high = np.exp(estimate + distances)
    return Ratio(math.exp(estimate), float(low), float(high), num_pairs)


def _resampled(samples: Sequence[Vector]) -> Vector:
    """Return resampled sums of the samples' means: float64 [num_resamples], unordered.

    For each sum, every sample is drawn anew, with replacement and as many values as it has. The seed of the random
    generator is fixed.
    """
    rng = np.random.default_rng(0)
    num_resamples = max(1000, min(NUM_RESAMPLES, MAX_DRAWS // max(map(len, samples))))
    sums = np.zeros(num_resamples)
    for values in samples:
        sums += values[rng.integers(len(values), size=(num_resamples, len(values)))].mean(axis=1)
    return sums


def _widening(count: int, tail: float) -> float:
    """Return the factor that corrects small samples: sqrt(n / (n - 1)) times Student's quantile over the normal one.

    Small samples are narrower than their distribution ("expanded percentile interval", Hesterberg, arXiv 1411.5279).
    The quantile is Cornish and Fisher's series.

    Args:
        count: number n of values, at least 2.
        tail: probability of each of the two sides outside of the interval.
    """
    z, freedom = NormalDist().inv_cdf(1 - tail), count - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return math.sqrt(count / freedom) * t / z
