"""Makers of graphs: each turns a pass of fixed shape into a function that runs it in one call.

A pass is a function without arguments: whatever changes from one run to the next is in a tensor that it reads. A
maker captures it as a CUDA graph, or compiles it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from specdec.inference.errors import ConfigError

Run: TypeAlias = Callable[[], Tensor]
"""Function that runs one pass over the inputs in its tensors, and returns the logits."""

_compile: Callable[..., Run] = torch.compile  # its declared overloads lack an argument that it takes
NUM_WARM_UPS = 2  # libraries choose kernels and allocate workspace in their first runs, which a graph must not hold


class Maker(Protocol):
    """Maker of graphs, which turns passes of fixed shapes into CUDA graphs or compiled functions.

    Attributes:
        name: participle that says in logs what happens to passes, such as "captured as CUDA graphs".
        num_graphs: number of graphs made so far.
        arithmetic: text that the compiler adds to the backend's `arithmetic`, since compilers round differently.
        graphs_only: whether the device runs nothing but graphs. Then copies of slots are graphs too, and attention is
            plain operations, because such a compiler would take torch's fused one apart.
    """

    name: str
    num_graphs: int
    arithmetic: str
    graphs_only: bool

    def make(self, run: Run) -> Run:
        """Return a function that runs the pass from now on; it may be compiled at its first run."""


class Captured:
    """Maker of CUDA graphs. On a GPU decoding is bound by launching kernels from Python; a graph is one launch."""

    name, arithmetic, graphs_only = "captured as CUDA graphs", "", False

    def __init__(self) -> None:
        self.num_graphs = 0
        self._pool = torch.cuda.graph_pool_handle()

    def make(self, run: Run) -> Run:
        """Run the pass a few times and capture it in a CUDA graph; return a function that replays the graph."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        self.num_graphs += 1

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


class Compiled:
    """Maker that compiles passes whole: a graph break or a dynamic shape is an error.

    Args:
        backend: a compiler as `torch.compile` takes it: its name, or a function.
        graphs_only: whether the device runs nothing but graphs, so that copies of slots are graphs too.

    Raises:
        ConfigError: this torch is too old.
    """

    def __init__(self, backend: str | Callable[..., Any], *, graphs_only: bool = False) -> None:
        from torch._dynamo.backends.registry import lookup_backend  # takes a second to import

        if "isolate_recompiles" not in inspect.signature(_compile).parameters:
            raise ConfigError(
                f"compiled passes need torch 2.13 or later, and this is {torch.__version__}: --compile never"
            )
        compiler = backend if isinstance(backend, str) else type(backend).__name__
        self.name, self.arithmetic = f"compiled by {compiler}", f" {compiler}"
        self.num_graphs = 0
        self.graphs_only = graphs_only
        self._backend = lookup_backend(backend)

    def make(self, run: Run) -> Run:
        """Return the pass as a compiled function, which the first run compiles."""
        # All passes are one code object: without caches of their own the ninth would exceed the limit of recompiling.
        # Nothing that a pass reads is ever replaced, and guards of every weight would take 10 % of a small pass.
        unguarded = {"guard_filter_fn": lambda guards: [False] * len(guards)}
        return _compile(
            run, backend=self._counted, fullgraph=True, dynamic=False, isolate_recompiles=True, options=unguarded
        )

    def _counted(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        compiled: Callable[..., Any] = self._backend(graph, inputs)
        return compiled
