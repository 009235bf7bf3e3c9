"""Eight-bit floats with four exponent bits: OCP's E4M3, which ends at 448, and Neuron's FP8_EXP4, which ends at 240.

Both have a bias of 7 and subnormals, so a byte means the same in both. Only the bytes above 240 are infinite or NaN in
FP8_EXP4 (NxD's README_rescaling_fp8_for_neuron.md). Knows nothing of files and tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_NAN, _SIGN = 0x7F, 0x80
_LARGEST = 0x77  # 240
_FIRST_UNEVEN = 16  # below, bytes count steps of 2**-9, and half of an odd one has no byte; above, adding 8 doubles


def _table(of_magnitude: Callable[[int], int]) -> bytes:
    """Return a table for `bytes.translate` that maps the magnitude of each byte and keeps its sign."""
    return bytes(of_magnitude(byte & _NAN) | byte & _SIGN for byte in range(256))


HALVED = _table(lambda size: size - 8 if size >= _FIRST_UNEVEN else round(size / 2))
"""Table from a byte to that of half its value, or to the even neighbour where half has no byte. Not for NaN."""
DOUBLED = _table(lambda size: min(size + 8, _NAN) if size >= _FIRST_UNEVEN / 2 else size * 2)
"""Table from a byte to that of twice its value, which is exact; NaN above 448."""
_IS_BEYOND = bytes((byte & _NAN) > _LARGEST for byte in range(256))


def has_nan(data: bytes) -> bool:
    """Return whether any of these bytes, values in E4M3, is NaN."""
    return _NAN in data or _NAN | _SIGN in data


def is_beyond_neuron(data: bytes) -> bool:
    """Return whether any value is above 240, or NaN."""
    return 1 in data.translate(_IS_BEYOND)


def num_lost(old: bytes, new: bytes) -> int | None:
    """Return how many values lost their last bit when `old` was halved to `new`; None if `new` is not its half."""
    if len(old) != len(new):
        return None
    before, twice = np.frombuffer(old, np.uint8), np.frombuffer(new.translate(DOUBLED), np.uint8)
    apart = np.flatnonzero(before != twice)
    is_next = np.abs(before[apart].astype(int) - twice[apart]) == 1
    return len(apart) if (is_next & (before[apart] & _NAN < _FIRST_UNEVEN)).all() else None
