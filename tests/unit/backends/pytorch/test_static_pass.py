"""Passes of fixed shapes give the logits of other passes, uncompiled or compiled without code generation."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.utils import run_and_get_code

from specdec.inference.backends.pytorch import packed_linear
from specdec.inference.backends.pytorch.backend import CAPTURED, TorchBackend
from specdec.inference.backends.pytorch.graphs import Captured, Compiled, Maker
from specdec.inference.backends.pytorch.shapes import Buckets
from specdec.inference.backends.pytorch.static_pass import FixedShapes, StaticPasses
from specdec.inference.model.slots import Backend, GraphCounts, Span
from tests.support.backend_contract import (
    MAX_LENGTH,
    NUM_SLOTS,
    TOKENS,
    BackendContract,
    Reference,
    Uncompiled,
    reference,
)
from tests.support.models import DEFAULT_VOCAB_SIZE, FAMILIES, tiny_model
from tests.support.neuron_compiler import NeuronCompiler

BUCKETS = Buckets(widths=(1, 3), prompts=(6,), batches=(1,), shortest=10)
LONG = 100
LONG_BUCKETS = Buckets(widths=(5,), prompts=(16,), shortest=LONG)
COMPILED = ("llama",)


def static_backend(maker: Maker, family: str = "llama", buckets: Buckets = BUCKETS) -> TorchBackend:
    fixed = FixedShapes(maker, buckets)
    backend = TorchBackend(tiny_model(family), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed)
    backend.warm_up()
    return backend


@lru_cache(maxsize=1)
def backend_of(family: str) -> TorchBackend:
    return static_backend(Uncompiled(), family)


class TestContract(BackendContract):
    @pytest.fixture(params=["llama", "gpt2", "gemma2", "gpt_oss", "mistral, windows"])
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def backend_of(self, family: str) -> Backend:
        return backend_of(family)

    def fresh(self) -> Backend:
        return static_backend(Uncompiled())


def play(backend: TorchBackend, plain: Reference, *, num_passes: int, seed: int = 0) -> None:
    """Play prompts of up to 70 tokens, verification, rollback and forks; compare all logits with fresh forwards."""
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
    """Play a history over compiled passes; check that none is compiled after the warm-up."""
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


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_passes_are_as_many_as_shapes(family: str) -> None:
    play_compiled(family, Compiled("aot_eager"))


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in COMPILED])
def test_every_family_compiles_whole(family: str) -> None:
    play_compiled(family, Compiled(NeuronCompiler(), graphs_only=True))


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", [*COMPILED, "gpt_oss"])
def test_inductors_passes_are_as_many_as_shapes(family: str) -> None:
    play_compiled(family, Compiled("inductor"))


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_inductors_passes_copy_no_rooms_and_multiply_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes compiled by Inductor copy no slots, and multiply packed weights.

    It was once otherwise: products ran over plain weights and each `scatter_` copied all slots: 2 to 4 times the time.
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
        """Maker of graphs that must be made again for each run after the first, as a compiler's guards may demand."""

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


def test_filling_leaves_the_slots_alone() -> None:
    fixed = FixedShapes(Uncompiled(), BUCKETS)
    backend = TorchBackend(tiny_model("llama"), num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed)
    backend.forward([Span(0, 0, TOKENS[:3], 0), Span(1, 0, TOKENS[:8], 0), Span(2, 0, TOKENS[:1], 0)])
    assert isinstance(backend.passes, StaticPasses)
    cache = backend.passes.cache
    for slot, end in ((0, 3), (1, 8), (2, 1)):
        for room in (*cache.keys, *cache.values):
            assert room[slot, :, :end].any()
            assert not room[slot, :, end:MAX_LENGTH].any()


def test_the_engine_asks_for_widths_that_there_are() -> None:
    backend = backend_of("llama")
    assert (backend.max_pass_tokens, backend.prompt_chunk_tokens) == (3, 6)
    eager = TorchBackend(tiny_model("llama"), num_slots=1, max_length=MAX_LENGTH)
    assert (eager.max_pass_tokens, eager.prompt_chunk_tokens) == (MAX_LENGTH, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_graphs_replay_what_was_captured() -> None:
    model = tiny_model("llama").to("cuda")
    fixed = FixedShapes(Captured(), CAPTURED)
    backend = TorchBackend(model, num_slots=NUM_SLOTS, max_length=MAX_LENGTH, fixed=fixed)
    backend.warm_up()
    for start in range(0, MAX_LENGTH, 4):
        logits = backend.forward([Span(1, start, TOKENS[start : start + 4], 4)])
        expected = reference("llama").logits(TOKENS)[start : start + 4]
        np.testing.assert_allclose(logits.cpu().numpy(), expected, rtol=0, atol=1e-2)
    assert backend.graphs.num_late == 0
