"""Standard Gumbel noise G(seed, t, v), which draft and target share, by one of two rules.

t is a position and v a token id. Each rule gives the same bits on numpy and torch. This project's rule hashes in 64-bit
integers, and computes the logarithm by IEEE additions, multiplications and divisions only, because the libraries' own
logarithms differ in the last bit. The rule of stock vLLM (runner V2, since 0.31) makes float32 numbers from a 32-bit
hash. docs/noise.md has the definition and test vectors of both, for other languages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import array_api_compat

from specdec.inference.model.slots import Array
from specdec.inference.request import Noise

_MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SQRT_HALF = 0.7071067811865476
LN_2 = 0.6931471805599453
# 2 * atanh(s) = 2s * (1 + z/3 + z^2/5 + ...) with z = s*s < 0.0295: seven terms leave a relative error below 1e-11.
_ATANH_COEFFICIENTS = tuple(1.0 / (2 * i + 1) for i in range(7))


def signed(value: int) -> int:
    """Return the two's complement int64 with the low 64 bits of `value` (torch has no uint64 arithmetic)."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Array, bits: int) -> Array:
    """Shift int64 to the right by `bits`, and fill with zeros instead of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Array) -> Array:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) to int64; products wrap modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _log(x: Array) -> Array:
    """Return the natural logarithm of positive finite float64: the same bits everywhere, relative error below 1e-11."""
    xp = array_api_compat.array_namespace(x)
    mantissa, exponent = xp.frexp(x)
    is_small = xp.astype(mantissa < SQRT_HALF, xp.float64)
    mantissa = mantissa * (is_small + 1.0)  # in [sqrt(1/2), sqrt(2)), and exponent 0 just below 1: no cancellation
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = z * _ATANH_COEFFICIENTS[-1]
    for coefficient in _ATANH_COEFFICIENTS[-2:0:-1]:
        series = (series + coefficient) * z
    return (series + 1.0) * s * 2.0 + (exponent - is_small) * LN_2


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return an int64 key per pair of seed and position, from which `gumbel_noise` makes the noise of each token.

    The key is a SplitMix64 hash of the position, on top of the hash of the seed.
    """
    pairs = zip(seeds, positions, strict=True)
    return [signed(_mix_int(_mix_int(seed + GOLDEN) + (position + 1) * GOLDEN)) for seed, position in pairs]


def seed_of_prompt(seed: int, prompt_digest: str) -> int:
    """Return the seed to use where a request's seed has the scope "prompt": one that depends on the prompt, too.

    Args:
        seed: the request's seed.
        prompt_digest: 16 hexadecimal digits, from `Provenance.prompt_digest`.
    """
    return _mix_int(_mix_int(seed + GOLDEN) + int(prompt_digest, 16))


def _mix_int(x: int) -> int:
    """Return what `_mix` returns, for a Python int, as an unsigned 64-bit number."""
    x &= _MASK_64
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK_64
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK_64
    return x ^ (x >> 31)


def gumbel_noise(keys: Array, token_ids: Array) -> Array:
    """Return standard Gumbel noise G(seed, t, v), where t is a position and v a token id.

    Args:
        keys: int64 [...], from `noise_keys`.
        token_ids: int64 [...], broadcastable against keys.

    Returns:
        float64 [...]: -log(-log(u)) of the uniform u = (h + 1/2) / 2^52, h the top 52 bits of a hash of key and token
            id.
    """
    return -_log(-_log(uniform_noise(keys, token_ids)))


def uniform_noise(keys: Array, token_ids: Array) -> Array:
    """Return the uniform numbers in (0, 1), float64, from which `gumbel_noise` computes Gumbel noise.

    The arguments are those of `gumbel_noise`.
    """
    xp = array_api_compat.array_namespace(keys, token_ids)
    high_bits = _shift_right(_mix(keys + (token_ids + 1) * signed(GOLDEN)), 12)
    return (xp.astype(high_bits, xp.float64) + 0.5) * 2.0**-52


_MASK_32 = (1 << 32) - 1
STOCK_SERIES_BELOW = 0.25
"""Limit of the uniform number u below which `stock_noise` takes log(1 - u) from the first eight terms of its series."""
STOCK_LEAST = 2.0**-24
"""Least number of which `stock_noise` takes a logarithm; it replaces a 1 - u that rounds to 0."""


def stock_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return a key per pair of seed and position, from which `stock_noise` makes the noise of each token.

    The key is the state of the hash Murmur3 after the seed and position - 1.
    """
    pairs = zip(seeds, positions, strict=True)
    return [_stir(_stir(_stir(0, seed & _MASK_32), seed >> 32), (position - 1) & _MASK_32) for seed, position in pairs]


def _stir(state: Any, word: Any) -> Any:
    """Apply Murmur3's step for a word of 32 bits, to ints or to int64 arrays; only the low bits of products count."""
    word = _rotate(word * 0xCC9E2D51 & _MASK_32, 15) * 0x1B873593 & _MASK_32
    return _rotate(state ^ word, 13) * 5 + 0xE6546B64 & _MASK_32


def _rotate(word: Any, bits: int) -> Any:
    """Rotate 32-bit words to the left by `bits`."""
    return (word << bits | word >> 32 - bits) & _MASK_32


def stock_noise(keys: Array, token_ids: Array) -> Array:
    """Return the Gumbel noise G(seed, t, v) of stock vLLM, where t is a position and v a token id.

    Args:
        keys: int64 [...], from `stock_keys`.
        token_ids: int64 [...], broadcastable against keys.

    Returns:
        float32 [...]: -log(-log(1 - u)) of the uniform u = (h + 1/2) / 2^32, h the hash.
    """
    xp = array_api_compat.array_namespace(keys, token_ids)
    h = _stir(keys, token_ids & _MASK_32) ^ 16  # the hash is over 16 bytes
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK_32
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK_32
    h = h ^ h >> 16
    u = xp.astype(h >> 16, xp.float32) * 2.0**-16 + (xp.astype(h & 0xFFFF, xp.float32) + 0.5) * 2.0**-32
    series = u * 0.125
    for divisor in (7, 6, 5, 4, 3, 2):
        series = u * (series + 1.0 / divisor)
    log = xp.where(u < STOCK_SERIES_BELOW, -u * (series + 1.0), _log_32(xp.clip(1.0 - u, min=STOCK_LEAST)))
    return -_log_32(-log)


def _log_32(x: Array) -> Array:
    """Return the logarithm of float32, rounded to float32; vLLM's own differs in the last bit from device to device."""
    xp = array_api_compat.array_namespace(x)
    return xp.astype(_log(xp.astype(x, xp.float64)), xp.float32)


LAWS: Mapping[Noise, tuple[Callable[[Sequence[int], Sequence[int]], list[int]], Callable[[Array, Array], Array]]] = {
    Noise.SPECDEC: (noise_keys, gumbel_noise),
    Noise.VLLM: (stock_keys, stock_noise),
}
"""Per rule for random numbers, two functions: keys of seeds and positions, and Gumbel noise of keys and token ids."""
