"""Facts and memory of the host: lazily allocated memory for slots, and the processor's instruction sets."""

from __future__ import annotations

import mmap
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path


def lazy_zeros(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that takes a page at the first write to it, and is freed with the last array over it.

    Pages of 2 MiB are switched off. A slot (the keys and values of one sequence) spreads each token over one row per
    layer and head, so with such pages ten tokens would take the memory of the whole slot. NumPy asks for such pages,
    and `torch.zeros` writes to all memory at once, so neither allocates this memory.

    Raises:
        MemoryError: the address space or the memory of this machine is smaller than `num_bytes`.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {num_bytes} bytes of memory") from error
    with suppress(OSError):  # a kernel without huge pages does not know the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def allow_huge_pages(memory: mmap.mmap, start: int, num_bytes: int) -> None:
    """Let the kernel move `num_bytes` bytes of the memory from byte `start` on into pages of 2 MiB, in the background.

    Such pages are faster to read. A kernel without them ignores the call.
    """
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, first, start + num_bytes - first)


@cache
def instruction_sets() -> str:
    """Return the line of /proc/cpuinfo that names the instruction sets, which decide how ONNX Runtime multiplies.

    Without such a line, return the processor's name.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
