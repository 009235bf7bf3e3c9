"""Shared noise G(seed, t, v): standard Gumbel from an integer hash, the same bits on numpy and torch.

The hash is 64-bit integer arithmetic, and the logarithm is made of IEEE additions, multiplications and divisions only,
because the libraries' own logarithms differ in the last bit. docs/noise.md has the definition and test vectors for
other languages.
"""

from __future__ import annotations

from collections.abc import Sequence

import array_api_compat

from specdec.inference.model.slots import Array

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
# 2 * atanh(s) = 2s * (1 + z/3 + z^2/5 + ...) with z = s*s < 0.0295: seven terms leave a relative error below 1e-11.
_ATANH_COEFFICIENTS = tuple(1.0 / (2 * i + 1) for i in range(7))


def _signed(value: int) -> int:
    """Return the two's complement int64 with the low 64 bits of `value` (torch has no uint64 arithmetic)."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Array, bits: int) -> Array:
    """Return the logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Array) -> Array:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) to int64; products wrap modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _log(x: Array) -> Array:
    """Return the natural logarithm of positive finite float64: the same bits everywhere, relative error below 1e-11."""
    xp = array_api_compat.array_namespace(x)
    mantissa, exponent = xp.frexp(x)
    is_small = xp.astype(mantissa < _SQRT_HALF, xp.float64)
    mantissa = mantissa * (is_small + 1.0)  # in [sqrt(1/2), sqrt(2)), and exponent 0 just below 1: no cancellation
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = z * _ATANH_COEFFICIENTS[-1]
    for coefficient in _ATANH_COEFFICIENTS[-2:0:-1]:
        series = (series + coefficient) * z
    return (series + 1.0) * s * 2.0 + (exponent - is_small) * _LN_2


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return an int64 key per (seed, position): SplitMix64 applied to the seed, then to the sum with the position."""
    pairs = zip(seeds, positions, strict=True)
    return [_signed(_mix_int(_mix_int(seed + _GOLDEN) + (position + 1) * _GOLDEN)) for seed, position in pairs]


def _mix_int(x: int) -> int:
    """Apply `_mix` to a Python int, as an unsigned 64-bit value."""
    x &= _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def gumbel_noise(keys: Array, token_ids: Array) -> Array:
    """Return standard Gumbel noise G(seed, t, v).

    Args:
        keys: int64 [...], from `noise_keys`.
        token_ids: int64 [...], broadcastable against keys.

    Returns:
        float64 [...]: -log(-log(u)) of the uniform u = (h + 1/2) / 2^52, h the top 52 bits of the hash.
    """
    return -_log(-_log(uniform_noise(keys, token_ids)))


def uniform_noise(keys: Array, token_ids: Array) -> Array:
    """Return the uniform numbers that make the noise: float64 in (0, 1)."""
    xp = array_api_compat.array_namespace(keys, token_ids)
    high_bits = _shift_right(_mix(keys + (token_ids + 1) * _signed(_GOLDEN)), 12)
    return (xp.astype(high_bits, xp.float64) + 0.5) * 2.0**-52
