"""The onnx backend gives the logits of Transformers, whatever its slots of the KV cache were used for before."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from specdec.inference.backends.host import lazy_zeros
from specdec.inference.backends.onnx import backend as onnx_backend
from specdec.inference.backends.onnx import packed
from specdec.inference.backends.onnx.backend import OnnxBackend
from specdec.inference.backends.onnx.graph import DecoderGraph
from specdec.inference.backends.onnx.packed import PackedDecoder
from specdec.inference.backends.onnx.shape import DecoderShape, shape_of
from specdec.inference.backends.registry import load_backend
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError
from specdec.inference.model.slots import Span
from tests.support.backend_contract import (
    HISTORY,
    MAX_LENGTH,
    NUM_SLOTS,
    TOKENS,
    BackendContract,
    Reference,
    assert_matches,
    reference,
)
from tests.support.models import CONTRACTS, save_tiny_model, tiny_model

# Variants of the families that change what the graph computes.
VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one key head": {"num_key_value_heads": 1},
    "heads without groups": {"num_key_value_heads": 4},
    "whole heads": {"head_dim": 16},
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_theta": 5000.0, "rms_norm_eps": 1e-3},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}


def load(path: Path, **fields: Any) -> OnnxBackend:
    settings = {"num_slots": NUM_SLOTS, "sequence_length": MAX_LENGTH, "num_threads": 1, **fields}
    backend = load_backend(ModelConfig(path, backend="onnx", **settings))
    assert isinstance(backend, OnnxBackend)
    return backend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def backend(checkpoint: Path) -> OnnxBackend:
    return load(checkpoint)


class TestContract(BackendContract):
    families = CONTRACTS["onnx", "float32"]

    def load(self, family: str) -> OnnxBackend:
        return load(save_tiny_model(Path(mkdtemp(dir=os.environ["XDG_CACHE_HOME"])), family))


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_of_a_family_are_respected(variant: str, tmp_path: Path) -> None:
    fields = VARIANTS[variant]
    backend = load(save_tiny_model(tmp_path, "llama", **fields))
    assert_matches(backend, Reference(tiny_model("llama", **fields)), HISTORY)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """Record the memory maps that backends allocate for slots; return their list, which each later load extends."""
    made: list[mmap.mmap] = []

    def recorded(num_bytes: int) -> mmap.mmap:
        made.append(lazy_zeros(num_bytes))
        return made[-1]

    monkeypatch.setattr("specdec.inference.backends.onnx.slots.lazy_zeros", recorded)
    return made


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no transparent huge pages"
)
def test_only_slots_that_are_half_full_get_huge_pages(tmp_path: Path, mappings: list[mmap.mmap]) -> None:
    """A slot gets huge pages of memory once it is half full.

    With huge pages from the start, a short sequence would take the memory of a whole slot. Without any, passes over
    long sequences take 12 % longer.
    """
    backend = load(save_tiny_model(tmp_path, "llama", max_position_embeddings=4096), sequence_length=4096)
    backend.forward([Span(slot, 0, range(100), 1) for slot in range(NUM_SLOTS)])
    assert huge_page_bytes(mappings[-1]) == 0
    backend.forward([Span(1, 100, (5,) * 2000, 1)])
    num_rooms = 2 * 2  # keys and values of two layers; each room begins and ends within a page
    assert abs(huge_page_bytes(mappings[-1]) - backend.slot_bytes) < num_rooms * 2 * mmap.PAGESIZE


def huge_page_bytes(mapping: mmap.mmap) -> int:
    """Return the number of bytes of the mapping in ranges that the kernel may give huge pages."""
    first = np.frombuffer(mapping, np.uint8).ctypes.data
    num_bytes = start = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the header of the next range of addresses
            start, end = (int(address, 16) for address in name.split("-"))
        elif name == "VmFlags:" and "hg" in values and first <= start < first + len(mapping):
            num_bytes += end - start
    return num_bytes


def test_more_spans_than_places_run_in_groups(backend: OnnxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_backend, "MAX_PLACES", 2)
    logits = backend.forward([Span(slot, 0, TOKENS[slot : slot + 3], slot) for slot in (2, 0, 1)])
    expected = [reference("llama").logits(TOKENS[slot : slot + 3])[3 - slot :] for slot in (2, 0, 1)]
    np.testing.assert_allclose(logits, np.concatenate(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("slots", [(0, 1, 2, 3, 4, 5, 6, 7), (7, 2, 0, 1, 5, 3), (6, 4, 5, 0)], ids=str)
def test_runs_give_the_logits_of_single_passes(slots: tuple[int, ...], family: str, tmp_path: Path) -> None:
    """Spans of one token in neighbouring slots, which a pass computes together, have the logits of separate passes.

    `slots` are those of the single tokens, in their order in the pass.

    The sequences have different lengths and any order, and a longer span is in the same pass. Tokens added to each
    sequence afterwards have the right logits too.
    """
    path = save_tiny_model(tmp_path, family)
    alone, together = (load(path, num_slots=9) for _ in range(2))
    for backend in (alone, together):
        for slot in range(9):
            backend.forward([Span(slot, 0, TOKENS[slot : 2 * slot + 3], 0)])
    spans = [Span(slot, slot + 3, (30 + slot,), 1) for slot in slots] + [Span(8, 11, (5, 6, 7), 2)]
    single = np.concatenate([alone.forward([span]) for span in spans])
    np.testing.assert_allclose(together.forward(spans), single, rtol=0, atol=1e-4)
    ends = {slot: slot + 3 for slot in range(9)} | {span.slot: span.start + len(span.token_ids) for span in spans}
    for slot, end in ends.items():
        one, other = (backend.forward([Span(slot, end, (9,), 1)]) for backend in (alone, together))
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4)


def test_a_slot_has_the_models_size(backend: OnnxBackend) -> None:
    num_layers, num_kv_heads, head_room = 2, 2, 16  # heads of 8 take the room of 16; one position is spare
    assert backend.slot_bytes == num_layers * 2 * num_kv_heads * head_room * (MAX_LENGTH + 1) * 4


def test_every_graph_is_built_at_loading(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs are built when the model is loaded.

    Regression: each graph was built, in 0.15 s, in the first pass that needed it. With 16 concurrent requests this
    reduced the throughput to 0.56 of what it was.
    """
    backend = load(checkpoint)
    monkeypatch.setattr(DecoderGraph, "build", None)
    for num_spans in range(1, backend.num_slots + 1):
        backend.forward([Span(slot, 0, [5, 6, 7], 1) for slot in range(num_spans)])


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose logits differ from those of Transformers is refused at loading.

    A later version of Transformers with another arithmetic for a family could cause this.
    """
    path = save_tiny_model(tmp_path, "llama")

    def wrong(model: Any) -> DecoderShape:
        shape = shape_of(model)
        object.__setattr__(shape, "score_scale", 0.7)
        return shape

    monkeypatch.setattr("specdec.inference.backends.onnx.packing.shape_of", wrong)
    with pytest.raises(UnsupportedModelError, match=r"its logits differ from Transformers' by .*: use backend torch"):
        load(path)


@pytest.mark.parametrize("off", [-1, 1])
def test_windows_are_tested_at_loading(off: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is refused at loading if ONNX Runtime applies its sliding window with an off-by-one error.

    The usual check at loading has 8 tokens, too few to leave a window of hundreds of tokens.
    """
    path = save_tiny_model(tmp_path, "mistral", sliding_window=MAX_LENGTH - 1)
    load(path)
    add = DecoderGraph._add

    def miscounted(self: DecoderGraph, operator: str, *arguments: Any, **attributes: Any) -> str:
        if operator == "GroupQueryAttention":
            attributes["local_window_size"] += off
        return add(self, operator, *arguments, **attributes)

    monkeypatch.setattr(DecoderGraph, "_add", miscounted)
    with pytest.raises(UnsupportedModelError, match="its logits differ from Transformers'"):
        load(path)


def test_windows_that_never_apply_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding window longer than a slot is left out of the graph, since it has no effect and slows attention."""
    path = save_tiny_model(tmp_path, "mistral", sliding_window=MAX_LENGTH + 1)
    monkeypatch.setattr(PackedDecoder, "narrowed", None)
    load(path)
    decoder = packed.packed_decoder(path, "float32", MAX_LENGTH)
    graph = DecoderGraph(decoder.shape, "float32", 1, MAX_LENGTH + 1).build(decoder.weights)
    attributes = [attribute for node in graph.graph.node for attribute in node.attribute]
    assert {attribute.i for attribute in attributes if attribute.name == "local_window_size"} == {-1}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", {}, "GPT2LMHeadModel is not supported by backend onnx, which runs llama, mistral, qwen2, qwen3"),
        ("llama", {"hidden_act": "gelu"}, "LlamaForCausalLM with gelu is not supported by backend onnx"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary frequencies change"),
    ],
)
def test_other_models_are_refused_before_their_weights_are_read(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    path = save_tiny_model(tmp_path, family, **fields)
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype bfloat16: backend onnx computes in float32 or int8 only"),
        ({"device": "cuda:0"}, "device cuda:0: backend onnx computes on cpu only"),
        ({"sequence_length": 129}, "sequence_length 129 is above the 128 positions"),
    ],
)
def test_settings_that_cannot_be_used_are_named(checkpoint: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint, **fields)


@pytest.mark.parametrize("width", range(6, 14))
def test_passes_that_are_filled_up_give_what_was_asked(
    backend: OnnxBackend, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """A pass that is padded with unused tokens gives the requested logits, without those of the padding.

    A pass that ends at the slot's last position has no room for padding.
    """
    monkeypatch.setattr(backend, "_fills_up", True)
    for start in (0, 3, MAX_LENGTH - width):
        backend.forward([Span(0, 0, TOKENS[:start], 0)] if start else [Span(1, 0, TOKENS[:1], 0)])
        logits = backend.forward([Span(0, start, TOKENS[start : start + width], 4)])
        expected = reference("llama").logits(TOKENS)[start + width - 4 : start + width]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    logits = backend.forward([Span(2, 0, TOKENS[:4], 2), Span(0, 2, TOKENS[2 : width - 2], 1)])
    expected = reference("llama").logits(TOKENS)[[2, 3, width - 3]]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
