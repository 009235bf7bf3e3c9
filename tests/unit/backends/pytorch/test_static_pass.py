"""Passes of fixed shapes, uncompiled or compiled without code generation, give the logits of ordinary passes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.utils import run_and_get_code

from specdec.inference.backends.pytorch import packed_linear
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.pytorch.graphs import Compiled, Maker
from specdec.inference.backends.pytorch.shapes import Buckets
from specdec.inference.backends.pytorch.static_pass import FixedShapes, StaticPasses
from specdec.inference.model.slots import GraphCounts, Span
from tests.support.backend_contract import (
    MAX_LENGTH,
    NUM_SLOTS,
    BackendContract,
    Reference,
    Uncompiled,
    reference,
)
from tests.support.models import DEFAULT_VOCAB_SIZE, tiny_model

BUCKETS = Buckets(widths=(1, 3), prompts=(6,), batches=(1,), shortest=10)
LONG = 100
LONG_BUCKETS = Buckets(widths=(5,), prompts=(16,), shortest=LONG)


def static_backend(maker: Maker, family: str = "llama", buckets: Buckets = BUCKETS) -> TorchBackend:
    fixed = FixedShapes(maker, buckets)
    backend = TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed)
    backend.warm_up()
    return backend


class TestContract(BackendContract):
    families = ("llama", "gpt2", "gemma2", "gpt_oss", "mistral, windows")

    def load(self, family: str) -> TorchBackend:
        return static_backend(Uncompiled(), family)


def play(backend: TorchBackend, plain: Reference, *, num_passes: int, seed: int = 0) -> None:
    """Run random passes (prompts of up to 70 tokens, rollbacks, forks); assert that logits equal those of `plain`."""
    rng = np.random.default_rng(seed)
    held: list[tuple[int, ...]] = [()] * NUM_SLOTS
    for _ in range(num_passes):
        if rng.random() < 0.2:
            source, destination = rng.permutation(NUM_SLOTS)[:2].tolist()
            backend.fork(source, destination, 0, len(held[source]))
            held[destination] = held[source]
        spans = []
        for slot in rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist():
            width = int(rng.integers(1, (2, 2, 6, 71)[rng.integers(4)]))
            start = min(int(len(held[slot]) * rng.choice([1, 1, rng.random()])), LONG - width)
            tokens = tuple(rng.integers(DEFAULT_VOCAB_SIZE, size=width).tolist())
            held[slot] = (*held[slot][:start], *tokens)
            spans.append(Span(slot, start, tokens, int(rng.choice([0, 1, width]))))
        expected = [plain.logits(held[span.slot])[len(held[span.slot]) - span.num_logits :] for span in spans]
        np.testing.assert_allclose(backend.forward(spans), np.concatenate(expected), rtol=0, atol=1e-4)


def play_compiled(family: str, maker: Compiled, *, num_passes: int = 25) -> None:
    """Run random passes on a backend with compiled passes; assert that nothing is compiled after the warm-up."""
    fixed = FixedShapes(maker, LONG_BUCKETS)
    backend = TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=LONG, fixed=fixed)
    backend.warm_up()
    assert isinstance(backend.passes, StaticPasses)
    num_copies = int(maker.graphs_only)
    assert backend.graphs == GraphCounts(len(backend.passes.shapes.all()) + num_copies, 0)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    play(backend, reference(family), num_passes=num_passes)
    assert backend.graphs.num_late == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert not torch._dynamo.utils.counters["graph_break"]


def test_compiled_passes_are_as_many_as_shapes() -> None:
    play_compiled("llama", Compiled("aot_eager"))


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_inductors_passes_are_as_many_as_shapes(family: str) -> None:
    play_compiled(family, Compiled("inductor"))


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_inductors_passes_copy_no_rooms_and_multiply_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes compiled by Inductor copy no slots of the KV cache, and multiply packed weights.

    Regression: matrix products used unpacked weights, and each `scatter_` copied all slots, so passes took 2
    to 4 times as long.
    """
    monkeypatch.setattr(packed_linear, "MIN_WEIGHTS", 0)
    fixed = FixedShapes(Compiled("inductor"), Buckets(widths=(1,), prompts=(), batches=(1,), shortest=LONG))
    backend = TorchBackend(tiny_model("gpt2"), num_slots=NUM_SLOTS, max_length=LONG, fixed=fixed)
    _, codes = run_and_get_code(backend.warm_up)
    assert isinstance(backend.passes, StaticPasses)
    room = backend.passes.cache.keys[0].numel()
    assert len(codes) == len(backend.passes.shapes.all())
    for code in codes:
        made = [
            math.prod(map(int, sizes.split(", "))) for sizes in re.findall(r"empty_strided_cpu\(\((.*?),?\),", code)
        ]
        assert made
        assert room not in made
        assert "specdec.packed_linear" in code
        assert "extern_kernels." not in code


def test_a_break_in_a_graph_is_an_error() -> None:
    def run() -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="graph_break"):
        Compiled("eager").make(run)()


def test_graphs_made_after_the_warm_up_are_counted() -> None:
    class Forgetful(Uncompiled):
        """Stand-in for a compiler that compiles again at each run after the first, as if Dynamo's guards failed."""

        def make(self, run: Any) -> Any:
            def again() -> torch.Tensor:
                made: torch.Tensor = super(Forgetful, self).make(run)()
                return made

            return again

    backend = static_backend(Forgetful())
    num_shapes = backend.graphs.num
    assert backend.graphs == GraphCounts(num_shapes, 0)
    backend.forward([Span(0, 0, (1,), 1)])
    assert backend.graphs == GraphCounts(num_shapes + 1, 1)


def test_the_engine_asks_for_widths_that_there_are() -> None:
    backend = static_backend(Uncompiled())
    assert (backend.max_pass_tokens, backend.prompt_chunk_tokens) == (3, 6)
    eager = TorchBackend(tiny_model("llama"), num_slots=1, max_length=MAX_LENGTH)
    assert (eager.max_pass_tokens, eager.prompt_chunk_tokens) == (MAX_LENGTH, 0)
