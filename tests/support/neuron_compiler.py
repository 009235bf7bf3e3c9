"""Stand-in for TorchNeuron's compiler on a CPU: it runs graphs that TorchNeuron would compile, and refuses others.

TorchNeuron is the native PyTorch backend of Neuron SDK 2.33, `torch.compile(backend="neuron")`. The rules are those of
its documentation and sources (`neuron_dynamo_backend`): each compiled graph has fixed shapes, and writes to inputs stay
in the graph that AOTAutograd makes. An analysis of Dynamo's graph must find the inputs that are written to, by
assignments `x[...] = y` and by methods with names that end in `_`, on an input or a view of it. The device has no
64-bit floats, no complex numbers, no boolean indices, no results of a size that depends on data. A graph that obeys
runs eagerly on the CPU. So a passing test shows nothing about the device's compile times, memory, speed or rounding.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
DECOMPOSED = get_decompositions(
    [_aten._unsafe_index, _aten.split, _aten.split_with_sizes, _aten.unbind, _aten.embedding, _aten.silu]
)
"""Decompositions of operators that TorchNeuron applies before its checks (a part of its list)."""

VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze"})
VIEWS |= {"expand", "expand_as", "narrow", "select", "split", "chunk", "unbind"}
"""Methods and functions that make a view: through them TorchNeuron traces a write back to the input."""

TOO_WIDE = frozenset({torch.float64, torch.complex64, torch.complex128})
INDEXED = frozenset({"index", "index_put", "index_put_"})


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph that the stand-in compiler accepted.

    Attributes:
        operators: number of calls of each ATen operator in it.
        num_changed: number of inputs that it writes to.
    """

    operators: Counter[str]
    num_changed: int


class NeuronCompiler:
    """Backend of `torch.compile`. It refuses a graph by a RuntimeError, which Dynamo wraps into an error of its own.

    Args:
        lower: function that gets every accepted graph, for example to hand it to a real compiler; None calls nothing.

    Attributes:
        graphs: accepted graphs, in the order of their compilation.
    """

    def __init__(self, lower: Callable[[GraphModule], object] | None = None) -> None:
        self.graphs: list[Compiled] = []
        self._lower = lower

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph from Dynamo, when `torch.compile` calls this backend; return the function that runs it."""
        found = changed_inputs(graph)

        def compile_graph(functional: GraphModule, _: Sequence[Any]) -> Any:
            self.graphs.append(_checked(functional, found))
            if self._lower is not None:
                self._lower(functional)
            return make_boxed_func(functional.forward)

        compiled = aot_autograd(
            fw_compiler=compile_graph,
            inference_compiler=compile_graph,
            keep_inference_input_mutations=True,
            decompositions=DECOMPOSED,
        )
        return compiled(graph, inputs)


def changed_inputs(graph: GraphModule) -> set[str]:
    """Return the names of the inputs that TorchNeuron takes for written to; its analysis overlooks writes by `out=`."""
    inputs: dict[Node, str] = {}  # a node that is an input or a view of one -> that input
    changed: set[str] = set()
    for node in graph.graph.nodes:
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if node.op == "placeholder":
            inputs[node] = node.name
        elif first in inputs and _is_change(node):
            changed.add(inputs[first])
        elif first in inputs and _is_view(node):
            inputs[node] = inputs[first]
    return changed


def _is_change(node: Node) -> bool:
    is_method = node.op == "call_method" and str(node.target).endswith("_")
    return is_method or (node.op == "call_function" and node.target is operator.setitem)


def _is_view(node: Node) -> bool:
    if node.op == "call_function" and node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return any(isinstance(part, slice) for part in index)
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in VIEWS


def _checked(graph: GraphModule, found: set[str]) -> Compiled:
    """Check a functional graph; return its operators, and the number of inputs that it writes to.

    Args:
        found: names of the inputs that TorchNeuron's analysis takes for written to.

    Raises:
        RuntimeError: TorchNeuron would refuse the graph, or compile it wrongly.
    """
    operators: Counter[str] = Counter()
    changed: set[Node] = set()
    for node in graph.graph.nodes:
        _require_known_sizes(node)
        if node.op != "call_function":
            continue
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        operators[name] += 1
        _require_places(node, name)
        if name == "copy_":
            changed.add(node.args[0])
    if len(changed) != len(found):
        names = ", ".join(sorted(found)) or "none"
        raise RuntimeError(f"{len(changed)} inputs are changed, but the alias analysis finds {len(found)}: {names}")
    return Compiled(operators, len(changed))


def _require_known_sizes(node: Node) -> None:
    for value in _values(node):
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise RuntimeError(f"{node} is a number that depends on data or on the size of an input")
        if isinstance(value, torch.Tensor):
            if any(not isinstance(size, int) for size in value.shape):
                raise RuntimeError(f"dynamic shape {tuple(value.shape)} of {node}")
            if value.dtype in TOO_WIDE:
                raise RuntimeError(f"{value.dtype} of {node}: the device computes in 32 bits at most")


def _require_places(node: Node, name: str) -> None:
    if name in INDEXED and any(_is_boolean(index) for index in node.args[1]):  # type: ignore[union-attr]
        raise RuntimeError(f"{node.target} has a boolean index: how many it selects depends on data")


def _is_boolean(index: Any) -> bool:
    return index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _values(node: Node) -> Iterator[Any]:
    value = node.meta.get("val")
    yield from value if isinstance(value, (tuple, list)) else [value]
