"""What computes in the servers of a comparison, as flags of main.py. Pure.

Owns which NeuronCores each server gets: all run at once, and a process without a share would take every core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.config import NOT_EMULATED, Emulation
from inference.errors import ConfigError

AUTO = "auto"
NEURON = "neuron"
NGRAM = "ngram"

START_TIMEOUT_S = 120.0
"""All servers load their models at the same time, on few cores."""
COMPILE_TIMEOUT_S = 4 * 3600.0
"""A server that finds no compiled model makes one."""


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """What computes.

    Attributes:
        name: backend of target and fused pair, as main.py calls it.
        draft_name: backend of a draft worker.
        tp_degree: NeuronCores of a target, and of a fused pair.
        draft_tp_degree: NeuronCores of a draft.
        method: speculation_method of a fused pair; None is main.py's default.
        first_core: number of the first NeuronCore that may be used.
        model_flags: further flags of every server with a model on neuron.
        compile_policy: one of COMPILE_POLICIES; "only" measures nothing.
        device_sampling: target and fused pair choose tokens on the device; so neither is compared with the other's way.
        draft_dtype: arithmetic of a draft worker on the CPU; None is main.py's.
        emulation: how long passes take at least; figures are not this machine's then.
    """

    name: str = AUTO
    draft_name: str = AUTO
    tp_degree: int = 1
    draft_tp_degree: int = 1
    method: str | None = None
    first_core: int = 0
    model_flags: tuple[str, ...] = ()
    device_sampling: bool = False
    compile_policy: str = "auto"
    emulation: Emulation = NOT_EMULATED
    draft_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("tp_degree", 1), ("draft_tp_degree", 1), ("first_core", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} {getattr(self, name)} is below {least}")
        if self.method is not None and self.name != NEURON:
            raise ConfigError(f"speculation_method {self.method} needs backend {NEURON}, not {self.name}")
        if self.compile_policy != "auto" and NEURON not in (self.name, self.draft_name):
            raise ConfigError(f"compile {self.compile_policy} needs backend {NEURON}, not {self.name}")
        if self.draft_dtype is not None and self.draft_name == NEURON:
            raise ConfigError(f"draft_dtype {self.draft_dtype} is for a draft on the CPU, not on {NEURON}")
        if self.device_sampling and self.name != NEURON:
            raise ConfigError(f"device_sampling needs backend {NEURON}, not {self.name}")
        if self.emulation != NOT_EMULATED and NEURON in (self.name, self.draft_name):
            raise ConfigError(f"emulate {self.emulation}: backend {NEURON} has a device")

    @property
    def compile_flag(self) -> str:
        """Of every server that loads compiled models."""
        return f"--compile={self.compile_policy}"

    @property
    def start_timeout_s(self) -> float:
        """Seconds until every server must be serving."""
        return COMPILE_TIMEOUT_S if NEURON in (self.name, self.draft_name) else START_TIMEOUT_S

    def one_graph(self, draft: str) -> bool:
        """Whether a fused pair is one compiled graph, for one gamma."""
        return self.name == NEURON and draft != NGRAM and self.method != "vanilla"

    @property
    def keeps_seeds(self) -> bool:
        """Whether tokens of such a graph are the host's choice, as everybody else's are."""
        return self.method in (None, "fused") and not self.device_sampling


@dataclass(frozen=True, slots=True)
class Server:
    """One process of a comparison.

    Attributes:
        role: in main.py.
        draft: its own, or that of its worker; None for none in particular.
        branches: beside a chain of the draft, at most.
        pooled: a target with a worker of its own, or that worker, which serves nobody else.
    """

    role: str
    draft: str | None = None
    branches: int | None = None
    pooled: bool = False


SHARED_TARGET = Server("target")
"""Serves alone, and what edge drafts propose."""


def server_flags(backend: BackendConfig, server: Server, servers: Sequence[Server], gammas: Sequence[int]) -> list[str]:
    """What main.py must be told of one server's backend.

    Args:
        servers: all of the comparison, this one among them.
    """
    name = backend.draft_name if server.role == "draft" else backend.name
    if server.role == "draft" and server.draft == NGRAM:
        return []
    flags = [] if name == AUTO else ["--backend", name]
    flags += [] if backend.emulation == NOT_EMULATED else ["--emulate", str(backend.emulation)]
    flags += ["--dtype", backend.draft_dtype] if server.role == "draft" and backend.draft_dtype else []
    flags += [*backend.model_flags, backend.compile_flag] if name == NEURON else []
    return flags + (_neuron_flags(backend, server, servers, gammas) if name == NEURON else [])


def _neuron_flags(
    backend: BackendConfig, server: Server, servers: Sequence[Server], gammas: Sequence[int]
) -> list[str]:
    first = backend.first_core + sum(_num_cores(backend, other) for other in servers[: servers.index(server)])
    num_cores = _num_cores(backend, server)
    flags = ["--tp_degree", str(num_cores), "--neuron_cores", f"{first}-{first + num_cores - 1}"]
    if server.role == "draft":
        return flags
    flags += ["--device_sampling"] if backend.device_sampling else []
    flags += ["--gamma", str(max(gammas) + _one_graph(backend, server))]  # such a graph counts the target's token too
    if server.role == "fused_target":
        flags += ["--draft_tp_degree", str(backend.draft_tp_degree)]
        flags += [] if backend.method is None else ["--speculation_method", backend.method]
    return flags


def _one_graph(backend: BackendConfig, server: Server) -> bool:
    return server.role == "fused_target" and server.draft is not None and backend.one_graph(server.draft)


def _num_cores(backend: BackendConfig, server: Server) -> int:
    """NeuronCores that a server has for itself."""
    if server.role == "draft":
        on_neuron = backend.draft_name == NEURON and server.draft != NGRAM
        return backend.draft_tp_degree if on_neuron else 0
    return backend.tp_degree if backend.name == NEURON else 0
