"""Eight-bit floats with four exponent bits: OCP's E4M3, which ends at 448, and Neuron's FP8_EXP4, which ends at 240.

Both have a bias of 7 and subnormals, so a byte means the same in both. Only the bytes above 240 are infinite or NaN in
FP8_EXP4 (NxD's README_rescaling_fp8_for_neuron.md). Knows nothing of files and tensors.
"""

from __future__ import annotations

_NAN, _SIGN = 0x7F, 0x80
_LARGEST = 0x77  # 240
_FIRST_UNEVEN = 16  # below, bytes count steps of 2**-9, and half of an odd one has no byte; above, adding 8 doubles


def _half(byte: int) -> int:
    size = byte & _NAN
    return byte & _SIGN | (size - 8 if size >= _FIRST_UNEVEN else round(size / 2))


HALVED = bytes(map(_half, range(256)))
"""Table for `bytes.translate` from the byte of an E4M3 value to the byte of half the value.

Some small values have no exact half; they go to the neighbour of the half whose last bit is 0. NaN has no valid entry.
"""
_ODD = bytes(byte for byte in range(256) if byte & _NAN < _FIRST_UNEVEN and byte % 2)  # half has no byte
_IS_BEYOND = bytes((byte & _NAN) > _LARGEST for byte in range(256))


def has_nan(data: bytes) -> bool:
    """Return whether any of these bytes, values in E4M3, is NaN."""
    return _NAN in data or _NAN | _SIGN in data


def is_beyond_neuron(data: bytes) -> bool:
    """Return whether any of these bytes, values in E4M3, is NaN or has a size above 240, the largest of FP8_EXP4."""
    return 1 in data.translate(_IS_BEYOND)


def num_lost(data: bytes) -> int:
    """Return how many of these bytes, values in E4M3, have no exact half, so that `HALVED` rounds it."""
    return len(data) - len(data.translate(None, _ODD))
