"""Machines of the comparison: sets of CPU cores of this host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.inference.errors import ConfigError

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU cores that stand for one machine of the comparison.

    Attributes:
        name: name of its side of the network, such as "edge".
        cores: numbers of its CPU cores.
    """

    name: str
    cores: tuple[int, ...]

    def __str__(self) -> str:
        plural = "s" if len(self.cores) > 1 else ""
        return f"{self.name}: core{plural} {', '.join(map(str, self.cores))}"


def split_into_machines(
    names: Sequence[str], usable_cores: Sequence[int], *, cores_per_machine: int
) -> tuple[Machine, ...]:
    """Return a machine for each name, with the next `cores_per_machine` of the usable cores.

    With `cores_per_machine` 0, all machines have the first usable core.

    Raises:
        ConfigError: there are too few cores, or `cores_per_machine` is below 0.
    """
    if cores_per_machine < 0:
        raise ConfigError(f"cores_per_machine {cores_per_machine} is below 0")
    if cores_per_machine == 0:
        return tuple(Machine(name, tuple(usable_cores[:1])) for name in names)
    num_wanted = len(names) * cores_per_machine
    if num_wanted > len(usable_cores):
        raise ConfigError(
            f"cores_per_machine {cores_per_machine}: {len(names)} machines need {num_wanted} cores, "
            f"this process may use {len(usable_cores)}"
        )
    starts = range(0, num_wanted, cores_per_machine)
    return tuple(
        Machine(name, tuple(usable_cores[start : start + cores_per_machine]))
        for name, start in zip(names, starts, strict=True)
    )


def cpu_model() -> str:
    """Return the name of this host's processor, "unknown" if the system does not provide it."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:  # not Linux
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
