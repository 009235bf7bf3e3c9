"""Limits of this machine: how fast it reads memory, and how fast it multiplies float32 matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = 1 << 28  # beyond any cache
MATRIX_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits of this machine.

    Attributes:
        bandwidth: GB/s at which it reads a large float32 matrix.
        arithmetic: GFLOP/s at which it multiplies square float32 matrices.
    """

    num_threads: int
    bandwidth: float
    arithmetic: float

    def best(self, other: Machine) -> Machine:
        """Return a `Machine` with the higher bandwidth and the higher arithmetic of both."""
        return Machine(self.num_threads, max(self.bandwidth, other.bandwidth), max(self.arithmetic, other.arithmetic))

    def pass_ms(self, weight_bytes: int, width: int) -> float:
        """Return the least milliseconds that a pass over `width` tokens can take with float32 weights of this size.

        They are the longer of reading all weights once and of multiplying them with all tokens.
        """
        reading = weight_bytes / self.bandwidth / 1e6
        multiplying = 2 * width * weight_bytes / 4 / self.arithmetic / 1e6
        return max(reading, multiplying)


def measure_machine(num_threads: int) -> Machine:
    """Measure this machine's limits with this number of threads; of several runs, the fastest counts."""
    torch.set_num_threads(num_threads)
    matrix, vector = torch.ones(READ_BYTES // 4 // 4096, 4096), torch.ones(4096)
    square = torch.ones(MATRIX_SIZE, MATRIX_SIZE)
    reading = _best_seconds(lambda: torch.mv(matrix, vector))
    multiplying = _best_seconds(lambda: torch.mm(square, square))
    return Machine(num_threads, READ_BYTES / reading / 1e9, 2 * MATRIX_SIZE**3 / multiplying / 1e9)


def _best_seconds(run: Callable[[], object], *, runs: int = 8) -> float:
    best = float("inf")
    for _ in range(runs):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best
