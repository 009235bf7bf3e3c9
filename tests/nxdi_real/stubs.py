"""Stand-ins for packages that only a Neuron machine has: torch_neuronx, torch_xla, nki and others.

NxDI imports hundreds of names from them and calls few on a CPU. Any name in these packages is an inert class: it may be
a base class, a decorator, an annotation or a subscripted kernel, and raises when it is run. Functions that NxDI does
run are written here. Nothing here imitates a device; the module `device` does.
"""

from __future__ import annotations

import collections
import importlib.abc
import importlib.machinery
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

PACKAGES = (
    "torch_neuronx",
    "torch_xla",
    "libneuronxla",
    "neuronxcc",
    "nki",
    "nkilib",
    "boto3",
    "botocore",
    "fairscale",
)
PLATFORM = "trn1"


class _Inert(type):
    """Metaclass of inert classes, which NxDI may use in any way, but whose instances raise when they are called."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        if "is_inert" not in cls.__dict__:  # a class that NxDI derives
            return super().__call__(*args, **keywords)
        if len(args) == 1 and not keywords and isinstance(args[0], FunctionType | type):
            return args[0]  # @name
        return _configured(cls.__name__)  # @name(...), or an object that no code looks into

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = inert(f"{cls.__name__}.{name}")
        setattr(cls, name, made)
        return made

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def inert(name: str) -> Any:
    """Return a class with this name that can be used in any way, but raises when it is run."""
    return _Inert(name.rpartition(".")[2], (), {"is_inert": True})


def _configured(name: str) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        if len(args) == 1 and not keywords and isinstance(args[0], FunctionType | type):
            return args[0]
        raise NotImplementedError(f"{name} is a Neuron kernel: there is no device here")

    return run


class _Module(ModuleType):
    """A stand-in for a package: each of its attributes is an inert class, made when it is first asked for."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = inert(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder and loader of the stand-ins for the packages in `PACKAGES`, and for all modules in them."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(BODIES.get(module.__name__, dict)())


# The contents of modules that NxDI runs on a CPU too; each is made when it is imported.


def _utilities() -> dict[str, Any]:
    return {"get_platform_target": lambda *_, **__: PLATFORM, "SUPPORTED_TYPES": {}}


def _operations() -> dict[str, Any]:
    return {
        "RmsNorm": SimpleNamespace(apply=_rms_norm),
        "Argmax": SimpleNamespace(apply=torch.argmax),
        "TopK": SimpleNamespace(apply=lambda tensor, k, dim, *_, **__: torch.topk(tensor, k, dim=dim)),
        "xla_hlo_call": _hlo_call,
    }


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, dim: int = -1) -> torch.Tensor:
    exact = hidden.float()
    scale = torch.rsqrt(exact.square().mean(dim, keepdim=True) + eps)
    return (exact * scale * weight.float()).to(hidden.dtype)


def _hlo_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a torch version of `rand_like`, the only HLO function that runs here; any other one raises when run."""
    if function.__name__ == "rand_like":
        return lambda tensor: torch.rand(tensor.shape).to(tensor.dtype)
    return _configured(function.__name__)


def _xla_model() -> dict[str, Any]:
    return {"xla_device": lambda *_: torch.device("cpu"), "mark_step": lambda *_: None, "get_ordinal": lambda *_: 0}


def _collectives() -> dict[str, Any]:
    return {"CollectivesConfig": CollectivesConfig}


class CollectivesConfig:
    """Configuration of collective operations, with the fields that NxD reads when it makes process groups."""

    def __init__(self, replica_groups: Sequence[Sequence[int]] | None = None, *_: Any, **__: Any) -> None:
        self.replica_groups = replica_groups
        self.rank_src_tgt_pairs: dict[int, list[Any]] = collections.defaultdict(list)


BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch_neuronx.utils": _utilities,
    "torch_neuronx.utils.utils": _utilities,
    "torch_neuronx.xla_impl.ops": _operations,
    "torch_xla.core.xla_model": _xla_model,
    "neuronxcc.nki._pre_prod_kernels.collectives": _collectives,
    "neuronxcc.nki._private_kernels.collectives": _collectives,
}
