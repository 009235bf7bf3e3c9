"""Backends (inference engines) of a comparison's servers, and the flags of main.py that choose them.

Several servers run at once on Neuron devices. So each gets NeuronCores of its own; by default the first takes all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from specdec.inference.cli.roles.demo import DemoSettings
from specdec.inference.config import COMPILE_POLICIES, COUNT, DTYPES, NOT_EMULATED, SPECULATION_METHODS, Emulation
from specdec.inference.errors import ConfigError
from specdec.inference.serving.models import NGRAM, VLLM, LoadingSettings, TargetModel
from specdec.inference.settings import Range, check, same, setting

AUTO = "auto"
NEURON = "neuron"


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Backend of the models, with its options.

    Attributes:
        name: inference engine of all models.
        draft: inference engine of draft workers, such as torch beside a target on neuron (default: --backend).
        tp_degree: NeuronCores of each target and fused pair; all servers run at once, each on its own cores.
        draft_tp_degree: NeuronCores of a draft (default: --tp_degree).
        first_core: number of the first NeuronCore to use (default: 0).
        method: speculation method of a fused pair on neuron; all but vanilla are compiled for one gamma.
        device_sampling: target and fused pair both choose tokens on the device; only for topologies target and fused,
            with greedy sampling.
        neuron_config: parameters of NxDI's NeuronConfig for every model, as a JSON object.
        compiled_model_path: folder of compiled models.
        compile_policy: models that are not compiled yet: auto compiles them, never refuses them, only compiles and ends
            without measuring.
        dtype: arithmetic on neuron.
        draft_dtype: arithmetic of a draft worker on the CPU; int8 needs backend onnx.
        sequence_length: tokens per slot on neuron.
        engine: engine of the target: specdec, our own, or vllm, for topologies target, distributed and pool, where the
            comparison runs in vLLM's environment.
        engine_flags: flag of vLLM, or its value; what stands after -- is read as these.
        start_timeout_s: see `DemoSettings`.
    """

    SECTION: ClassVar = "backend (see docs/neuron.md)"

    name: str = setting(AUTO, "--backend NAME")
    draft: str | None = setting(None, "--draft_backend NAME")
    tp_degree: int = setting(1, "--tp_degree N", within=Range(1))
    draft_tp_degree: int | None = setting(None, "--draft_tp_degree N", within=Range(1))
    first_core: int | None = setting(None, "--first_core N", within=COUNT)
    method: str | None = setting(None, "--speculation_method", choices=SPECULATION_METHODS)
    device_sampling: bool = setting(False, "--device_sampling")
    neuron_config: str | None = setting(None, "--neuron_config JSON")
    compiled_model_path: str | None = setting(None, "--compiled_model_path DIR")
    compile_policy: str = setting(COMPILE_POLICIES[0], "--compile", choices=COMPILE_POLICIES)
    dtype: str | None = setting(None, "--dtype NAME")
    draft_dtype: str | None = setting(None, "--draft_dtype", choices=DTYPES)
    sequence_length: int | None = setting(None, "--sequence_length N")
    emulation: Emulation = same(LoadingSettings, "emulation")
    engine: str = same(TargetModel, "engine")
    engine_flags: tuple[str, ...] = same(TargetModel, "engine_flags")
    start_timeout_s: float = same(DemoSettings, "start_timeout_s")

    def __post_init__(self) -> None:
        check(self)
        for name in ("compiled_model_path", "draft_tp_degree", "first_core", "neuron_config"):
            if getattr(self, name) is not None and NEURON not in (self.name, self.draft_name):
                raise ConfigError(f"{name} needs backend {NEURON}, not {self.name}")
        if self.method is not None and self.name != NEURON and self.engine != VLLM:
            raise ConfigError(f"speculation_method {self.method} needs backend {NEURON}, not {self.name}")
        if self.compile_policy != "auto" and NEURON not in (self.name, self.draft_name):
            raise ConfigError(f"compile {self.compile_policy} needs backend {NEURON}, not {self.name}")
        if self.draft_dtype is not None and self.draft_name == NEURON:
            raise ConfigError(f"draft_dtype {self.draft_dtype} is for a draft on the CPU, not on {NEURON}")
        if self.device_sampling and self.name != NEURON:
            raise ConfigError(f"device_sampling needs backend {NEURON}, not {self.name}")
        if self.emulation != NOT_EMULATED and NEURON in (self.name, self.draft_name):
            raise ConfigError(f"emulate {self.emulation}: backend {NEURON} has a device")
        self._target_model().check_engine()

    def _target_model(self) -> TargetModel:
        """Return the settings of a target that its engine may refuse, for a check before anything starts.

        These are the engine with its flags, dtype, sequence length and emulated pass times. All other fields have their
        defaults.
        """
        given = {name: value for name in ("dtype", "sequence_length") if (value := getattr(self, name)) is not None}
        loading = LoadingSettings(emulation=replace(self.emulation, draft=NOT_EMULATED.draft), **given)
        return TargetModel(engine=self.engine, engine_flags=self.engine_flags, loading=loading)

    @property
    def compile_flag(self) -> str:
        """Flag --compile with its value, for every server that loads compiled models."""
        return f"--compile={self.compile_policy}"

    @property
    def draft_name(self) -> str:
        """Name of the backend of draft workers: their own if one is set, else that of the target."""
        return self.draft or self.name

    @property
    def num_draft_cores(self) -> int:
        """Number of NeuronCores of a draft: its own setting, or else as many as the target has."""
        return self.draft_tp_degree or self.tp_degree

    @property
    def model_flags(self) -> tuple[str, ...]:
        """Flags that every server with a model on neuron gets unchanged."""
        names = ("dtype", "sequence_length", "neuron_config", "compiled_model_path")
        return tuple(f"--{name}={value}" for name in names if (value := getattr(self, name)) is not None)

    def one_graph(self, draft: str) -> bool:
        """Return whether a server with both models compiles the target and this draft into one graph for one gamma."""
        return self.name == NEURON and draft != NGRAM and self.method != "vanilla"

    @property
    def keeps_seeds(self) -> bool:
        """Return whether the host, and not the device, chooses the tokens of a server with both models on neuron.

        Only then do equal seeds give the same tokens there as in other topologies.
        """
        return self.method in (None, "fused") and not self.device_sampling


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Server process that a comparison starts.

    Attributes:
        role: value of its flag --role in main.py.
        draft: draft model of the server itself or of its pool's workers; None for the target that all drafts share.
        branches: maximum number of branches, which are alternatives to the draft's best sequence of tokens; None
            without a draft worker.
        pooled: whether this is a target with its own pool of draft workers, or one of these workers.
        workers: number of draft workers of its pool; 1 without a pool.
        number: number of this worker in its pool, from 0.
    """

    role: str
    draft: str | None = None
    branches: int | None = None
    pooled: bool = False
    workers: int = 1
    number: int = 0


SHARED_TARGET = ServerPlan("target")
"""Target server that answers clients without a draft, and also verifies for draft workers on a second machine."""


def vllm_flags(backend: BackendConfig, num_slots: int) -> list[str]:
    """Return main.py's flags for a target on vLLM. Prefix caching is off, so that repeated prompts are read again.

    Args:
        num_slots: number of requests that the server processes at once.
    """
    return [
        "--engine",
        VLLM,
        "--",
        "--max-num-seqs",
        str(num_slots),
        "--no-enable-prefix-caching",
        *backend.engine_flags,
    ]


def server_flags(
    backend: BackendConfig, server: ServerPlan, servers: Sequence[ServerPlan], gammas: Sequence[int]
) -> list[str]:
    """Return main.py's flags for the backend of one server; empty if the defaults are right.

    Args:
        servers: all servers of the comparison, including this one, which share the NeuronCores.
        gammas: all compared numbers of draft tokens per round; servers on neuron are started for the largest.
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
    backend: BackendConfig, server: ServerPlan, servers: Sequence[ServerPlan], gammas: Sequence[int]
) -> list[str]:
    first = (backend.first_core or 0) + sum(_num_cores(backend, other) for other in servers[: servers.index(server)])
    num_cores = _num_cores(backend, server)
    flags = ["--tp_degree", str(num_cores), "--neuron_cores", f"{first}-{first + num_cores - 1}"]
    if server.role == "draft":
        return flags
    flags += ["--device_sampling"] if backend.device_sampling else []
    flags += ["--gamma", str(max(gammas) + _one_graph(backend, server))]  # one graph counts the target's token too
    if server.role == "fused_target":
        flags += ["--draft_tp_degree", str(backend.num_draft_cores)]
        flags += [] if backend.method is None else ["--speculation_method", backend.method]
    return flags


def _one_graph(backend: BackendConfig, server: ServerPlan) -> bool:
    return server.role == "fused_target" and server.draft is not None and backend.one_graph(server.draft)


def _num_cores(backend: BackendConfig, server: ServerPlan) -> int:
    """Return the number of NeuronCores that a server has for itself; 0 if it does not run on neuron."""
    if server.role == "draft":
        on_neuron = backend.draft_name == NEURON and server.draft != NGRAM
        return backend.num_draft_cores if on_neuron else 0
    return backend.tp_degree if backend.name == NEURON else 0
