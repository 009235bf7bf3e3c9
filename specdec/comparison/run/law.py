"""Statistical test of a server: do its texts follow the distribution that it reports in its own log-probabilities?

Works with any server of OpenAI's completions API. Speculation must not change the law of a text, which is the
probability of each next token given all tokens before it. With each token of an answer the server reports the most
probable tokens at that position. The test counts how often the sampled token was the most probable one (rank 1), the
second, and so on, and compares these counts with the reported probabilities. It keeps separate counts for each
beginning of an answer that many answers share; all other tokens are counted by the rank of the token before them. If
the server follows its law, the observed counts less the expected ones have mean zero, so their squares over the
covariances of the ranks add up to a chi-squared value. The first token of an answer is left out, since no server
speculates about it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

from specdec.inference.errors import ConfigError, UnavailableError

FloatArray = npt.NDArray[np.float64]
NUM_RANKS = 5
"""Number of most probable tokens that are classes of their own: OpenAI's API reports five. All others are one class."""
NUM_CLASSES = NUM_RANKS + 1
NUM_TOKENS = 8
"""Tokens of one answer; short answers often share their beginnings."""
ALPHA = 0.001
"""Probability that a server fails the test although its texts follow the probabilities that it reports."""
SHIFT = 0.03
"""Change of a probability that the test is to find. An example: vLLM drew tokens of 60 % in 63 %, until PR 54282."""
POWER = 0.99
"""Probability with which a change of `SHIFT` is found."""
MIN_VISITS = 100
"""Least number of answers that share a beginning for which the tokens after it have counts of their own."""
FREEDOM = 200
"""Degrees of freedom assumed for the choice of the number of tokens; the real number is known from the answers only."""
MIN_EXPECTED = 5.0
"""Least expected count of a class of ranks; a class with less is merged with the next better one."""
LAW = {"temperature": 1.0, "top_p": 1.0, "logprobs": NUM_RANKS}
PROMPTS = ("The weather today is", "Once upon a time", "1, 2, 3, 4,", "The capital of France is", "def add(a, b):\n")
_DRAWS = 400_000  # from a chi-squared law, for probabilities down to some 1e-5


class Row:
    """Counts of the ranks of tokens with the same text before them.

    Where enough answers begin alike, these are the tokens after that beginning. Elsewhere they are all tokens that
    follow a token of the same rank. A token's rank is its place among the most probable tokens at its position; lower
    ranks are one class.

    Attributes:
        excess: [NUM_CLASSES] of float64, observed less expected counts.
        expected: [NUM_CLASSES] of float64, counts expected from the probabilities that the server reports.
        covariance: [NUM_CLASSES, NUM_CLASSES] of float64, of `excess`.
    """

    def __init__(self) -> None:
        self.excess, self.expected = np.zeros(NUM_CLASSES), np.zeros(NUM_CLASSES)
        self.covariance = np.zeros((NUM_CLASSES, NUM_CLASSES))

    def add(self, rank: int, best: Sequence[float]) -> None:
        """Count one token.

        Args:
            rank: class of the token: 0 for the most probable one at its position, up to `NUM_RANKS` for low ranks.
            best: probabilities of the `NUM_RANKS` most probable tokens there, the largest first.
        """
        share = np.zeros(NUM_CLASSES)
        share[: len(best)] = best
        share[NUM_RANKS] = max(0.0, 1.0 - share.sum())
        self.excess -= share
        self.excess[rank] += 1.0
        self.expected += share
        self.covariance += np.diag(share) - np.outer(share, share)

    def statistic(self) -> tuple[float, int]:
        """Return the row's chi-squared value and its degrees of freedom."""
        merge = _merging(self.expected)[1:]  # one class follows from the others
        if not len(merge):
            return 0.0, 0
        excess, covariance = merge @ self.excess, merge @ self.covariance @ merge.T
        return float(excess @ np.linalg.pinv(covariance, hermitian=True) @ excess), len(merge)

    @property
    def largest(self) -> tuple[float, int]:
        """Return the largest deviation of a count from its expectation, in standard deviations, and its class of ranks.

        Classes with an expected count below `MIN_EXPECTED` do not count.
        """
        sigma = np.sqrt(np.maximum(self.covariance.diagonal(), 1e-12))
        sigmas = np.where(self.expected >= MIN_EXPECTED, np.abs(self.excess) / sigma, 0.0)
        return float(sigmas.max()), int(sigmas.argmax())


@dataclass
class Counts:
    """Tokens of answers, with what the test has to know of each.

    Attributes:
        tokens: for each token the name of its prompt followed by the texts of the tokens before it, the rank of the
            token before, its own rank, and the probabilities of the most probable tokens at its position, the largest
            first.
    """

    tokens: list[tuple[tuple[Any, ...], int, int, list[float]]] = field(default_factory=list)

    def take(self, name: Hashable, answer: dict[str, Any]) -> None:
        """Add the tokens of an answer from the second one on, except those without known probabilities.

        Args:
            name: anything that stands for the answer's prompt.
            answer: answer of the completions API to a request with `logprobs`.
        """
        begun: tuple[Any, ...] = (name,)
        before: int | None = None
        for text, rank, best in classes(answer):
            if before is not None and best:
                self.tokens.append((begun, before, rank, best))
            begun, before = (*begun, text), rank

    def rows(self) -> dict[str, Row]:
        """Return the counts by what stands before their tokens: a beginning that many answers share, else a rank.

        The rank is that of the token before.
        """
        visits = Counter(begun for begun, *_ in self.tokens)
        rows: defaultdict[str, Row] = defaultdict(Row)
        for begun, before, rank, best in self.tokens:
            is_common = visits[begun] >= MIN_VISITS
            rows[f"after {''.join(map(str, begun))!r}" if is_common else f"after {RANKS[before]}"].add(rank, best)
        return rows


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments of the command `law`; ConfigError is raised if one is out of range.

    Attributes:
        url: base URL of the server, with or without /v1.
        model: name of the model; None for the first one that the server names.
        num_requests: number of answers; None for as many as the test needs to find `shift`.
        alpha: probability of a false alarm.
        shift: change of a probability that the test is to find; see `SHIFT`.
        concurrency: requests in flight.
    """

    url: str
    model: str | None
    num_requests: int | None
    alpha: float
    shift: float
    concurrency: int

    def __post_init__(self) -> None:
        whole = ("concurrency", 1, 1024), ("num_requests", 1, 10_000_000)
        for name, low, high in (("alpha", 0.0001, 0.5), ("shift", 0.001, 0.5), *whole):
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise ConfigError(f"--{name} {value} must be in {low}..{high}")


RANKS = (*(f"rank {i + 1}" for i in range(NUM_RANKS)), "a lower rank")


def _chi_squared(rows: Iterable[Row]) -> tuple[float, int]:
    """Return the chi-squared value of all rows and its degrees of freedom."""
    values = [row.statistic() for row in rows]
    return sum(value for value, _ in values), sum(freedom for _, freedom in values)


def _merging(expected: FloatArray) -> FloatArray:
    """Return a 0-1 matrix [num_merged, NUM_CLASSES] that merges neighbouring classes of ranks.

    Each merged class has an expected count of at least `MIN_EXPECTED`, unless it is the only one.

    Args:
        expected: [NUM_CLASSES], expected count of each class.
    """
    rows: list[FloatArray] = []
    for rank, unit in enumerate(np.eye(NUM_CLASSES)):
        if rows and (expected[rank] < MIN_EXPECTED or rows[-1] @ expected < MIN_EXPECTED):
            rows[-1] = rows[-1] + unit
        else:
            rows.append(unit)
    return np.array(rows)


def p_value(counts: Counts) -> float:
    """Return the probability of counts that deviate at least as much, if texts follow the reported probabilities.

    It is estimated by random draws, down to some 1e-5. If there are too few tokens to test, it is 1.
    """
    statistic, freedom = _chi_squared(counts.rows().values())
    if not freedom:
        return 1.0
    return float(np.mean(np.random.default_rng(1).chisquare(freedom, _DRAWS) >= statistic))


def num_needed(alpha: float, shift: float) -> int:
    """Return the number of tokens that the test needs to find a wrong probability with the probability `POWER`.

    Args:
        alpha: probability of a false alarm.
        shift: how far a probability of 1/2 is off. It is taken to be off for all tokens; if it is off for one token in
            n, the test needs n times as many.
    """
    draws = np.random.default_rng(2)
    limit = np.quantile(draws.chisquare(FREEDOM, _DRAWS), 1.0 - alpha)
    low, high = 1.0, 1000.0
    while high - low > 0.5:
        middle = (low + high) / 2
        found = np.mean(draws.noncentral_chisquare(FREEDOM, middle, _DRAWS) >= limit)
        low, high = (low, middle) if found >= POWER else (middle, high)
    return math.ceil(high * 0.25 / shift**2)


def classes(answer: dict[str, Any]) -> Iterator[tuple[str, int, list[float]]]:
    """Yield the text, the rank and the probabilities of the best tokens for each token of an answer.

    Ranks are counted from 0; `NUM_RANKS` stands for all lower ones. The list of probabilities is empty if the server
    reports fewer than `NUM_RANKS` best tokens, and if one of them is a part of a character: several such tokens have
    the same text.

    Args:
        answer: answer of the completions API to a request with `logprobs`.
    """
    entries = answer["choices"][0].get("logprobs") or {"tokens": (), "token_logprobs": (), "top_logprobs": ()}
    columns = (entries["tokens"], entries["token_logprobs"], entries["top_logprobs"])
    for text, logprob, top in zip(*columns, strict=True):
        best = sorted(top.items(), key=lambda each: -each[1])[:NUM_RANKS]
        rank = next((i for i, (_, each) in enumerate(best) if abs(each - logprob) < 1e-9), NUM_RANKS)
        is_clear = len(best) == NUM_RANKS and not any("\ufffd" in name for name, _ in best)
        yield text, rank, [math.exp(each) for _, each in best] if is_clear else []


def main(arguments: Sequence[str]) -> int:
    """Test the server that the arguments name; return 0 if its texts follow the reported probabilities, else 1."""
    return asyncio.run(_test(Asked(**vars(_parser().parse_args(arguments)))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec law", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="server of OpenAI's completions API, as http://localhost:8000")
    parser.add_argument("--model", help="name of the model (the first one that is served)")
    parser.add_argument("--num_requests", type=int, help=f"answers of {NUM_TOKENS} tokens (as many as the power takes)")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="probability of a false alarm (%(default)s)")
    parser.add_argument("--shift", type=float, default=SHIFT, help="change of a probability to find (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (%(default)s)")
    return parser


async def _test(asked: Asked) -> int:
    num_tokens = num_needed(asked.alpha, asked.shift)
    num_requests = asked.num_requests or math.ceil(num_tokens / (NUM_TOKENS - 1))
    reach = math.sqrt(num_tokens / (num_requests * (NUM_TOKENS - 1))) * asked.shift
    print(
        f"{num_requests} answers of {NUM_TOKENS} tokens at temperature 1, seeds 0 to {num_requests - 1}: a server that "
        f"follows its law fails with probability {asked.alpha:g}; an even chance that is off by {reach:.3f} is found "
        f"with probability {POWER:g}",
        file=sys.stderr,
    )
    counts = await answers_of(asked.url, asked.model, num_requests, asked.concurrency)
    p, rows = p_value(counts), counts.rows()
    holds = p >= asked.alpha
    verdict = "the texts follow the reported law" if holds else "the texts do NOT follow the reported law"
    print(f"{verdict}: {len(counts.tokens)} tokens, p = {p:.5f}")
    (sigmas, rank), place = max((row.largest, name) for name, row in rows.items())
    expected = rows[place].expected[rank]
    seen = f"{expected + rows[place].excess[rank]:.0f} times for {expected:.1f}, {sigmas:.1f} sigma"
    print(f"largest deviation {place}: {RANKS[rank]} {seen}")
    return int(not holds)


async def answers_of(url: str, model: str | None, num_requests: int, concurrency: int) -> Counts:
    """Return the tokens of `num_requests` answers of a server, at most `concurrency` of them at a time.

    Args:
        model: name of the model; None for the first one that the server names.

    Raises:
        UnavailableError: the server cannot be reached, answers with an error, or without log-probabilities.
    """
    url = url.rstrip("/").removesuffix("/v1")
    model = model or (await _call(f"{url}/v1/models"))["data"][0]["id"]
    counts, places, done = Counts(), asyncio.Semaphore(concurrency), 0

    async def ask(seed: int) -> None:
        nonlocal done
        prompt = PROMPTS[seed % len(PROMPTS)]
        body = {"model": model, "prompt": prompt, "seed": seed, "max_tokens": NUM_TOKENS, **LAW}
        async with places:
            counts.take(seed % len(PROMPTS), await _call(f"{url}/v1/completions", body))
        done += 1
        if sys.stderr.isatty() or done % 100 == 0 or done == num_requests:
            print(f"{done} of {num_requests} answers", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)

    await asyncio.gather(*map(ask, range(num_requests)))
    if not counts.tokens:
        raise UnavailableError(f"{url}: its answers have no token with the log-probabilities of {NUM_RANKS} others")
    return counts


async def _call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a server's JSON answer to a GET request, or to a POST request if there is a body.

    Raises:
        UnavailableError: the server cannot be reached, answers with an error, or not with JSON.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        raw = await asyncio.to_thread(lambda: urlopen(request, timeout=600).read())
    except OSError as exc:  # an HTTPError is one
        detail = exc.read().decode(errors="replace")[:500] if hasattr(exc, "read") else ""
        raise UnavailableError(f"{url}: {exc} {detail}") from exc
    try:
        answer: dict[str, Any] = json.loads(raw)
    except ValueError as exc:
        raise UnavailableError(f"{url} does not answer with JSON: {raw[:200]!r}") from exc
    return answer
