"""Noise (random numbers that choose tokens) has the documented bits; logits are processed as Transformers does.

A row's token depends on no other row of its batch.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc  # type: ignore[import-untyped]
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.inference.request import BIAS, MAX_SEED, RANGES, SamplingParams
from specdec.inference.sampling.choice import choose_tokens, rank_tokens
from specdec.inference.sampling.noise import gumbel_noise, noise_keys
from specdec.inference.sampling.penalties import TokensBefore
from specdec.inference.sampling.truncation import process_logits
from specdec.inference.settings import Range

NOISE_DOC = (Path(__file__).parents[3] / "docs" / "noise.md").read_text(encoding="utf-8")
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

# Without a deadline, since the machine may be busy.
relaxed = settings(deadline=None, max_examples=60)

any_seed = st.one_of(st.sampled_from([0, 1, 2**63 - 1, 2**63, MAX_SEED]), st.integers(0, MAX_SEED))
any_position = st.one_of(st.sampled_from([0, 1, 2**31]), st.integers(0, 2**40))
any_token_id = st.one_of(st.sampled_from([0, 1, 2**31]), st.integers(0, 2**31))
sampled_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(1e-3, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    seed=any_seed,
)
any_params = st.one_of(sampled_params, st.builds(SamplingParams, seed=any_seed))


def random_logits(seed: int, num_rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Return random float32 logits like a model's: some rows peaked, some flat, hardly any ties."""
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0.1, 5.0, size=(num_rows, 1))
    return (spread * rng.normal(size=(num_rows, vocab_size))).astype(np.float32)


def noise(seeds: list[int], positions: list[int], token_ids: list[int]) -> npt.NDArray[np.float64]:
    """Return the noise (random numbers), computed with numpy, for the i-th seed, position and token id of each list."""
    values: npt.NDArray[np.float64] = gumbel_noise(np.array(noise_keys(seeds, positions)), np.array(token_ids))
    return values


# --- The noise against references that share no code with it ---


def mix(x: int) -> int:
    """Apply the published finalizer of SplitMix64 to a 64-bit integer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    """Return the integer from which `mix` makes x."""

    def unshift(y: int, bits: int) -> int:
        z = y
        for _ in range(64 // bits):
            z = y ^ (z >> bits)
        return z

    x = (unshift(x, 31) * pow(0x94D049BB133111EB, -1, 2**64)) & MASK
    x = (unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK
    return unshift(x, 30)


def signed(x: int) -> int:
    return (x & MASK) - ((x & MASK) >> 63 << 64)


def gumbel_of_hash(token_hash: int) -> float:
    """Return the Gumbel variate that follows from a 64-bit hash, computed with the C library's logarithm."""
    return -math.log(-math.log(((token_hash >> 12) + 0.5) * 2.0**-52))


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]),
        (
            1234567,
            [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
        ),
    ],
)
def test_a_rows_hashes_are_the_published_outputs_of_splitmix64(seed: int, outputs: list[int]) -> None:
    """The hashes of a row's token ids are SplitMix64's published outputs, with the row's key as the seed."""
    values = gumbel_noise(np.array([seed]), np.arange(len(outputs)))
    assert [mix(seed + (i + 1) * GOLDEN) for i in range(len(outputs))] == outputs
    np.testing.assert_allclose(values, [gumbel_of_hash(output) for output in outputs], atol=1e-9)


def test_keys_chain_two_published_streams() -> None:
    """A position's key is an output of SplitMix64, seeded with SplitMix64's first output for the request's seed."""
    first = 0xE220A8397B1DCDAF
    assert noise_keys([0] * 5, list(range(5))) == [signed(mix(first + (t + 1) * GOLDEN)) for t in range(5)]


@relaxed
@given(st.lists(st.tuples(any_seed, any_position, any_token_id), min_size=1, max_size=20))
def test_noise_agrees_with_a_reference_in_plain_integers(triples: list[tuple[int, int, int]]) -> None:
    """The noise (random numbers that choose tokens) equals that of a reference in Python's integers.

    The reference would reveal errors of signed arithmetic, of a shift's mask, and of the logarithm's series.
    """
    seeds, positions, token_ids = (list(column) for column in zip(*triples, strict=True))
    expected = [
        gumbel_of_hash(mix(mix(mix(seed + GOLDEN) + (t + 1) * GOLDEN) + (v + 1) * GOLDEN)) for seed, t, v in triples
    ]
    np.testing.assert_allclose(noise(seeds, positions, token_ids), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("token_hash", [0, 1 << 12, 1 << 63, (1 << 63) - 1, MASK - (1 << 12), MASK])
def test_noise_is_finite_and_right_at_extreme_hashes(token_hash: int) -> None:
    """Noise (random numbers that choose tokens) is finite and right for hashes at both ends of their range.

    If a uniform number were rounded to 0 or 1, a token would, very rarely, be impossible or certain.
    """
    key = np.array([signed(unmix(token_hash) - GOLDEN)])
    value = float(gumbel_noise(key, np.array([0]))[0])
    assert value == pytest.approx(gumbel_of_hash(token_hash), rel=1e-9)
    assert -3.61 < value < 36.74


# --- The same bits from numpy and torch ---


@relaxed
@given(
    st.lists(st.tuples(any_seed, any_position), min_size=1, max_size=8), st.lists(any_token_id, min_size=1, max_size=70)
)
def test_numpy_and_torch_give_the_same_noise_bits(pairs: list[tuple[int, int]], token_ids: list[int]) -> None:
    """Numpy and torch compute the same bits of noise (random numbers) for any keys and any number of token ids."""
    keys = noise_keys(*(list(column) for column in zip(*pairs, strict=True)))
    by_numpy = gumbel_noise(np.array(keys)[:, None], np.array(token_ids)[None, :])
    by_torch = gumbel_noise(torch.tensor(keys)[:, None], torch.tensor(token_ids)[None, :])
    assert by_torch.dtype == torch.float64
    assert by_numpy.tobytes() == by_torch.numpy().tobytes()


def test_numpy_and_torch_noise_is_equal() -> None:
    """Numpy and torch compute the same bits of noise (random numbers) for 400,000 values, with its two logarithms."""
    keys = noise_keys([3, MAX_SEED, 0, 11], [0, 5, 2**31, 131071])
    token_ids = np.arange(100_000)
    by_numpy = gumbel_noise(np.array(keys)[:, None], token_ids)
    by_torch = gumbel_noise(torch.tensor(keys)[:, None], torch.from_numpy(token_ids))
    assert by_numpy.tobytes() == by_torch.numpy().tobytes()


@relaxed
@given(
    st.integers(0, 2**32), st.integers(1, 300), st.lists(st.tuples(any_params, any_position), min_size=1, max_size=6)
)
def test_numpy_and_torch_choose_the_same_tokens(
    logits_seed: int, vocab_size: int, rows: list[tuple[SamplingParams, int]]
) -> None:
    """Numpy and torch choose the same tokens from the same logits and parameters.

    Draft and target may use different libraries; if their choices differed, fewer draft tokens would be accepted.
    """
    sampling, positions = [params for params, _ in rows], [position for _, position in rows]
    logits = random_logits(logits_seed, len(rows), vocab_size)
    assert choose_tokens(logits, sampling, positions) == choose_tokens(torch.from_numpy(logits), sampling, positions)


# --- docs/noise.md ---


def doc_rows(first_column: str) -> list[dict[str, str]]:
    """Return the rows of the table in docs/noise.md whose first column is called `first_column`."""
    _, table = NOISE_DOC.split(f"\n| {first_column} |", maxsplit=1)
    header, _, *lines = f"| {first_column} |{table}".split("\n\n")[0].strip().splitlines()
    titles, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in (header, *lines))
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_the_documented_listing_gives_the_same_bits() -> None:
    """The Python code printed in docs/noise.md computes the project's noise (random numbers) to the bit."""
    listing = re.search(r"```python\n(.*?)```", NOISE_DOC, re.DOTALL)
    assert listing is not None
    names: dict[str, Any] = {}
    exec(listing[1], names)
    gumbel: Callable[[int, int, int], float] = names["gumbel"]
    rng = np.random.default_rng(0)
    triples = [(int(s), int(t), int(v)) for s, t, v in rng.integers(0, 2**31, size=(2000, 3))]
    seeds, positions, token_ids = (list(column) for column in zip(*triples, strict=True))
    assert noise(seeds, positions, token_ids).tolist() == [gumbel(*triple) for triple in triples]


def test_the_documented_noise_vectors_hold() -> None:
    """The examples in docs/noise.md have the hash, uniform number and noise that the code computes."""
    rows = doc_rows("seed")
    assert len(rows) >= 12
    for row in rows:
        seed, position, token_id = (int(row[title]) for title in ("seed", "position", "token id"))
        token_hash = mix(mix(mix(seed + GOLDEN) + (position + 1) * GOLDEN) + (token_id + 1) * GOLDEN)
        assert row["hash"] == f"{token_hash:016x}"
        assert row["u"] == repr(((token_hash >> 12) + 0.5) * 2.0**-52)
        assert row["G"] == repr(float(noise([seed], [position], [token_id])[0]))


@pytest.mark.parametrize("row", doc_rows("logits"), ids=lambda row: f"{row['logits']} at {row['temperature']}")
def test_the_documented_choices_hold(row: dict[str, str]) -> None:
    logits = [[float(logit) for logit in row["logits"].split(",")]]
    params = SamplingParams(
        temperature=float(row["temperature"]),
        top_k=int(row["top_k"]),
        top_p=float(row["top_p"]),
        min_p=float(row["min_p"]),
        seed=int(row["seed"]),
    )
    for array in (np.array(logits), torch.tensor(logits)):
        assert choose_tokens(array, [params], [int(row["position"])]) == [int(row["token"])]


# --- Uniformity and independence ---


CUBE_SIDE = 40
NUM_BINS = 8


def uniform_cube(first_seed: int) -> npt.NDArray[np.float64]:
    """Return the uniform numbers from which noise is made: float64 [seed, position, token], from `first_seed` on."""
    pairs = list(itertools.product(range(first_seed, first_seed + CUBE_SIDE), range(CUBE_SIDE)))
    keys = np.array(noise_keys([seed for seed, _ in pairs], [position for _, position in pairs]))
    values: npt.NDArray[np.float64] = gumbel_noise(keys[:, None], np.arange(CUBE_SIDE))
    return np.exp(-np.exp(-values)).reshape((CUBE_SIDE,) * 3)


def chi_squared_p_value(cells: npt.NDArray[np.int64], num_cells: int) -> float:
    """Return the p-value of the hypothesis that `cells`, integers from 0 to `num_cells` - 1, are uniform."""
    counts, expected = np.bincount(cells, minlength=num_cells), len(cells) / num_cells
    return float(chdtrc(num_cells - 1, np.sum((counts - expected) ** 2) / expected))


@pytest.mark.parametrize("first_seed", [0, 2**63 - CUBE_SIDE // 2, MAX_SEED - CUBE_SIDE + 1])
def test_noise_is_uniform_and_independent_of_its_neighbours(first_seed: int) -> None:
    """Noise (random numbers) is uniform, and independent of that of neighbouring seeds, positions and tokens.

    Clients use seeds 0, 1, 2, ... Diagonals are tested too, since keys that are sums would repeat along them.
    """
    cube = uniform_cube(first_seed)
    p_values = [chi_squared_p_value((cube.ravel() * 64).astype(np.int64), 64)]
    bins = (cube * NUM_BINS).astype(np.int64)
    for shift in itertools.product((-1, 0, 1), repeat=3):
        if shift <= (0, 0, 0):
            continue  # itself, and the mirror images of the other thirteen
        here = bins[tuple(slice(max(-step, 0), CUBE_SIDE - max(step, 0)) for step in shift)]
        there = bins[tuple(slice(max(step, 0), CUBE_SIDE - max(-step, 0)) for step in shift)]
        p_values.append(chi_squared_p_value((here * NUM_BINS + there).ravel(), NUM_BINS**2))
    assert min(p_values) * len(p_values) > 1e-3


@pytest.mark.parametrize("first_seed", [0, 7, 2**63 - CUBE_SIDE // 2])
def test_no_stream_is_a_shifted_copy_of_another(first_seed: int) -> None:
    """The noise (random numbers) of one seed and position is no shifted copy of another's.

    Equal values among 64,000 of 2^52 possible ones would mean that the numbers of two seeds overlap.
    """
    cube = uniform_cube(first_seed)
    assert len(np.unique(np.round(cube, 13))) == cube.size


def test_noise_has_a_gumbels_mean_and_variance() -> None:
    """Noise (random numbers that choose tokens) has a Gumbel distribution's mean, Euler's constant, and variance."""
    values = noise([5] * 1000, list(range(1000)), [0]).ravel()
    values = np.append(values, gumbel_noise(np.array(noise_keys([9], [9])), np.arange(200_000)))
    assert np.mean(values) == pytest.approx(np.euler_gamma, abs=5 * (math.pi**2 / 6 / len(values)) ** 0.5)
    assert np.var(values) == pytest.approx(math.pi**2 / 6, rel=0.03)


# --- Processing ---


def transformers_scores(logits: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.float64]:
    """Return the logits as Transformers' `generate` would change them (its warpers), in double precision."""
    warpers = [
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k) if params.top_k else None,
        TopPLogitsWarper(params.top_p) if params.top_p < 1.0 else None,
        MinPLogitsWarper(params.min_p) if params.min_p else None,
    ]
    scores = torch.from_numpy(logits).double()
    for warper in warpers:
        if warper is not None:
            scores = warper(None, scores)
    processed: npt.NDArray[np.float64] = scores.numpy()
    return processed


@settings(relaxed, max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 40), sampled_params)
def test_processing_is_transformers(logits_seed: int, vocab_size: int, params: SamplingParams) -> None:
    """Temperature and truncation leave the same tokens and values as Transformers' `generate`."""
    logits = random_logits(logits_seed, 1, vocab_size)
    assume(len(np.unique(logits)) == vocab_size)
    # A probability within rounding of a limit may fall on either side of it.
    ratios = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    assume(np.all(np.abs(ratios - params.min_p) > 1e-9))
    ranked = np.sort(ratios[0])[::-1][: params.top_k or None]
    assume(params.top_p == 1.0 or np.all(np.abs(np.cumsum(ranked) / np.sum(ranked) - params.top_p) > 1e-9))
    expected = transformers_scores(logits, params)
    for array in (logits, torch.from_numpy(logits)):
        np.testing.assert_array_equal(np.asarray(process_logits(array, [params])), expected)


def any_number(limits: Range) -> st.SearchStrategy[float]:
    """Return a strategy for numbers of a range; half of the floats are powers of two, tiny ones included."""
    if isinstance(limits.low, int):
        return st.one_of(st.integers(0, 60), st.integers(limits.low, int(limits.high)))
    exponents = st.one_of(st.integers(-1074, 7), st.integers(-1074, -1000))  # half of them make infinite quotients
    powers = exponents.map(lambda exponent: 2.0**exponent)
    signed = st.one_of(powers, powers.map(operator.neg)) if limits.low < 0 else powers  # a filter would drop half
    return st.one_of(signed.filter(limits.__contains__), st.floats(limits.low, limits.high, exclude_min=limits.above))


token_ids = st.lists(st.integers(0, 19), max_size=8)
legal_params = st.builds(
    SamplingParams,
    **{
        name: st.one_of(st.just(SamplingParams.__dataclass_fields__[name].default), any_number(limits))
        for name, limits in RANGES.items()
    },
    logit_bias=st.dictionaries(st.integers(0, 19), any_number(BIAS), max_size=3).map(lambda d: tuple(d.items())),
)
any_before = st.builds(lambda prompt, output: TokensBefore.of([*prompt, *output], len(prompt)), token_ids, token_ids)
any_logits = st.one_of(
    st.integers(0, 2**32).map(lambda seed: random_logits(seed, 1, 20)[0]),
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=20, max_size=20).map(
        lambda row: np.array(row, dtype=np.float32)
    ),
)


@settings(relaxed, max_examples=50)
@given(st.lists(st.tuples(any_logits, legal_params, any_position, any_before), min_size=2, max_size=5))
def test_a_row_does_not_depend_on_its_neighbours(rows: list[tuple[Any, ...]]) -> None:
    """The token chosen in a row does not depend on other rows of the batch.

    Regression: a repetition_penalty below 1e-307 made scores NaN, and a token depended on other rows.
    """
    logits, *columns = (list(column) for column in zip(*rows, strict=True))
    chosen = []
    for array in (np.stack(logits), torch.from_numpy(np.stack(logits))):
        together = rank_tokens(array, *columns, count=3)
        chosen.append([best[0][0] for best in together])
        assert choose_tokens(array, *columns) == chosen[-1]
        for i, (_, *own) in enumerate(rows):
            alone = [[value] for value in own]
            assert rank_tokens(array[i : i + 1], *alone, count=3) == [together[i]]
            assert choose_tokens(array[i : i + 1], *alone) == [chosen[-1][i]]
            assert math.isfinite(together[i][0][1])
    assert chosen[0] == chosen[1]


@relaxed
@given(st.integers(0, 2**32), st.integers(1, 50), st.lists(sampled_params, min_size=2, max_size=8))
def test_a_rows_scores_do_not_depend_on_its_neighbours(
    logits_seed: int, vocab_size: int, sampling: list[SamplingParams]
) -> None:
    """The scores of a row do not depend on other rows of the batch.

    Scores show an influence of another row's truncation, which rarely changes the chosen token.
    """
    logits = random_logits(logits_seed, len(sampling), vocab_size)
    together = process_logits(logits, sampling)
    for i, params in enumerate(sampling):
        np.testing.assert_array_equal(together[i], process_logits(logits[i : i + 1], [params])[0])


@pytest.mark.parametrize(
    ("params", "survivors"),
    [
        (SamplingParams(temperature=1.0, top_k=2), [1, 2, 3]),
        (SamplingParams(temperature=1.0, top_p=0.6), [1, 2, 3]),
        (SamplingParams(temperature=1.0, top_p=1e-9), [1]),
        (SamplingParams(temperature=1.0, min_p=1.0), [1]),
        (SamplingParams(temperature=1.0, top_k=99), [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_tokens_tied_with_the_last_are_kept(params: SamplingParams, survivors: list[int]) -> None:
    """If truncation (top_k, top_p, min_p) keeps a token, it keeps all tokens with the same score as well."""
    for array in (np.array([[0.0, 3.0, 2.0, 2.0, 1.0]]), torch.tensor([[0.0, 3.0, 2.0, 2.0, 1.0]])):
        assert np.flatnonzero(np.isfinite(np.asarray(process_logits(array, [params]))[0])).tolist() == survivors


# --- Greedy and its neighbourhood ---


@relaxed
@given(st.lists(st.integers(-2, 2), min_size=1, max_size=40), sampled_params, any_position)
def test_greedy_takes_the_lowest_best_id(logits: list[int], params: SamplingParams, position: int) -> None:
    """Greedy decoding takes the lowest of equally good ids in all libraries and dtypes; bfloat16 makes ties common."""
    greedy = replace(params, temperature=0.0)
    for array in (np.array([logits], dtype=np.float32), torch.tensor([logits], dtype=torch.bfloat16)):
        assert choose_tokens(array, [greedy], [position]) == [logits.index(max(logits))]


@relaxed
@given(st.integers(0, 2**32), st.integers(2, 200), any_seed, any_position)
def test_a_small_temperature_is_greedy(logits_seed: int, vocab_size: int, seed: int, position: int) -> None:
    """The smallest temperatures choose the most likely token, since the noise has a range of only 40.4.

    Regression: temperature 5e-324 made all positive logits infinite, and the first of them was chosen.
    """
    logits = random_logits(logits_seed, 1, vocab_size)
    second, best = np.sort(logits[0].astype(np.float64))[-2:]
    assume(second < best)
    for temperature in ((best - second) / 41.0, 1e-150, 1e-310, 5e-324):
        for truncated in ({}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}):
            params = SamplingParams(temperature=float(temperature), seed=seed, **truncated)  # type: ignore[arg-type]
            for array in (logits, torch.from_numpy(logits)):
                assert choose_tokens(array, [params], [position]) == [int(np.argmax(logits))]


@relaxed
@given(st.integers(0, 2**32), st.integers(1, 200), sampled_params, any_position)
def test_one_survivor_is_greedy(logits_seed: int, vocab_size: int, params: SamplingParams, position: int) -> None:
    """A truncation that leaves one token chooses the most likely one, whatever temperature and noise are."""
    logits = random_logits(logits_seed, 1, vocab_size)
    assume(np.count_nonzero(logits == logits.max()) == 1)
    # 1 - 1e-300 is 1: by the cumulative probability alone no token would stay.
    for change in ({"top_k": 1}, {"top_p": 1e-12}, {"top_p": 1e-300}, {"min_p": 1.0}):
        tightest = replace(params, **change)
        assert choose_tokens(logits, [tightest], [position]) == [int(np.argmax(logits))]


# --- Parameters ---


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": -0.0}, {"temperature": 100.0}, {"top_p": 1.0}]
)
def test_the_limits_themselves_are_allowed(params: dict[str, float]) -> None:
    built = SamplingParams(**params)  # type: ignore[arg-type]
    assert built.greedy == (built.temperature == 0.0)


VOCAB_SIZE = 300
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=20, seed=2),
    SamplingParams(temperature=1.0, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.0, seed=4),
    SamplingParams(logit_bias=((5, 30.0),)),
]


def naive(logits: np.ndarray, params: SamplingParams, position: int) -> np.ndarray:
    """Return the scores of one row by their definition: processed logits, with biases, plus noise (random numbers)."""
    row = logits.astype(np.float64)
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    if params.greedy:
        return row
    keys = np.asarray(noise_keys([params.seed], [position]))
    noise = gumbel_noise(keys[:, None], np.arange(VOCAB_SIZE)[None, :])
    scores: np.ndarray = (process_logits(row[None].astype(np.float32), [params]) + noise)[0]
    return scores


@pytest.mark.parametrize("sampling", [SETTINGS, SETTINGS[:1] * 6, SETTINGS[1:2] * 6, SETTINGS[2:4] * 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_best_tokens_are_ranked_by_score(sampling: list[SamplingParams], count: int) -> None:
    """The best tokens of a row are ordered by score, with the chosen one first, by numpy and torch alike."""
    logits, positions = random_logits(1, len(sampling), VOCAB_SIZE), [10 + row for row in range(len(sampling))]
    for array in (logits.copy(), torch.from_numpy(logits)):
        ranked = rank_tokens(array, sampling, positions, count=count)
        assert [row[0][0] for row in ranked] == choose_tokens(array, sampling, positions)
        assert np.array_equal(array, logits), "the given logits are unchanged"
        for row, (params, position) in enumerate(zip(sampling, positions, strict=True)):
            scores = naive(logits[row], params, position)
            best = np.argsort(-scores, kind="stable")[:count]
            assert [token_id for token_id, _ in ranked[row]] == best.tolist()
            assert [score for _, score in ranked[row]] == pytest.approx(scores[best].tolist(), abs=1e-6)


def test_nothing_comes_second_where_one_token_is_left() -> None:
    greedy = SamplingParams(temperature=1.0, top_k=1)
    ((_, (_, score)),) = rank_tokens(random_logits(1, 1, VOCAB_SIZE), [greedy], [3], count=2)
    assert score == -math.inf
