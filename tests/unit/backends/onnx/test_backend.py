"""The onnx backend gives the logits of plain Transformers, whatever its slots went through before."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from specdec.inference.backends.host import lazy_zeros
from specdec.inference.backends.onnx import backend as onnx_backend
from specdec.inference.backends.onnx import layout, packed
from specdec.inference.backends.onnx import packing as onnx_make
from specdec.inference.backends.onnx.backend import OnnxBackend
from specdec.inference.backends.onnx.graph import DecoderGraph
from specdec.inference.backends.onnx.packed import PackedDecoder
from specdec.inference.backends.onnx.shape import DecoderShape, shape_of
from specdec.inference.backends.onnx.slots import OnnxSlots
from specdec.inference.backends.registry import load_backend
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError
from specdec.inference.model.slots import Backend, Span
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


@lru_cache(maxsize=1)
def backend_of(family: str) -> OnnxBackend:
    """Return one backend per family for all examples: the tokens that earlier ones left must not matter."""
    path = Path(mkdtemp(dir=os.environ["XDG_CACHE_HOME"]))
    return load(save_tiny_model(path, family))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def backend(checkpoint: Path) -> OnnxBackend:
    return load(checkpoint)


class TestContract(BackendContract):
    @pytest.fixture(params=CONTRACTS["onnx", "float32"])
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def backend_of(self, family: str) -> Backend:
        return backend_of(family)

    def fresh(self) -> Backend:
        path = Path(mkdtemp(dir=os.environ["XDG_CACHE_HOME"]))
        return load(save_tiny_model(path, "llama"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_of_a_family_are_respected(variant: str, tmp_path: Path) -> None:
    fields = VARIANTS[variant]
    backend = load(save_tiny_model(tmp_path, "llama", **fields))
    assert_matches(backend, Reference(tiny_model("llama", **fields)), HISTORY)


def test_slots_that_leak_are_noticed(backend: OnnxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    values = OnnxSlots.values
    monkeypatch.setattr(OnnxSlots, "values", lambda self, slots: values(self, range(1) if 2 in slots else slots))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_matches(backend, reference("llama"), HISTORY)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """Record the memory of the slots of each backend that is loaded."""
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

    Earlier, short sequences would take the memory of a whole slot; without any, passes over long ones take 12 % longer.
    """
    backend = load(save_tiny_model(tmp_path, "llama", max_position_embeddings=4096), sequence_length=4096)
    backend.forward([Span(slot, 0, range(100), 1) for slot in range(NUM_SLOTS)])
    assert huge_page_bytes(mappings[-1]) == 0
    backend.forward([Span(1, 100, (5,) * 2000, 1)])
    num_rooms = 2 * 2  # keys and values of two layers; each room begins and ends within a page
    assert abs(huge_page_bytes(mappings[-1]) - backend.slot_bytes) < num_rooms * 2 * mmap.PAGESIZE


def huge_page_bytes(mapping: mmap.mmap) -> int:
    """Return the number of bytes of the mapping that may be in huge pages."""
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
    """A run, spans of one token in neighbouring slots, gives the logits of a pass for each.

    Sequences of different lengths are in any order, beside a longer span; all can be continued.
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


def test_a_run_takes_memory_of_its_own_slots_only(tmp_path: Path, mappings: list[mmap.mmap]) -> None:
    """A run, single tokens in neighbouring slots, takes memory for its own slots alone."""
    backend = load(save_tiny_model(tmp_path, "llama", max_position_embeddings=4096), sequence_length=4096, num_slots=8)
    backend.forward([Span(slot, 0, TOKENS[:1], 1) for slot in (0, 3, 4, 6, 7)])  # loading tests with slot 0
    touched = np.frombuffer(mappings[-1], np.float32).reshape(2 * 2, 8, -1).any(axis=(0, 2))  # layers' keys and values
    assert touched.tolist() == [slot in (0, 3, 4, 6, 7) for slot in range(8)]


def test_a_slot_has_the_models_size(backend: OnnxBackend) -> None:
    num_layers, num_kv_heads, head_room = 2, 2, 16  # heads of 8 take the room of 16; one position is spare
    assert backend.slot_bytes == num_layers * 2 * num_kv_heads * head_room * (MAX_LENGTH + 1) * 4


def test_a_second_load_needs_no_original_weights(
    checkpoint: Path, backend: OnnxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_make, "load_weights", None)
    assert_matches(load(checkpoint), reference("llama"), HISTORY)


def test_other_weights_are_packed_again(tmp_path: Path) -> None:
    load(save_tiny_model(tmp_path, "llama", seed=1))  # the backend is gone, and its lock with it
    old, long_ago = packed_folder(tmp_path), time.time() - 10 * onnx_make.SETTLED_S
    os.utime(old, (long_ago, long_ago))
    backend = load(save_tiny_model(tmp_path, "llama", seed=2))
    assert_matches(backend, Reference(tiny_model("llama", seed=2)), HISTORY)
    assert not old.exists()


def test_every_graph_is_built_at_loading(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs are built when the model is loaded.

    It was once otherwise: graphs were left to the passes that needed them, 0.15 s each: 0.56 of the speed at 16
    streams.
    """
    backend = load(checkpoint)
    monkeypatch.setattr(DecoderGraph, "build", None)
    for num_spans in range(1, backend.num_slots + 1):
        backend.forward([Span(slot, 0, [5, 6, 7], 1) for slot in range(num_spans)])


def packed_folder(path: Path) -> Path:
    return packed.folder_of(path, "float32")


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut short": (layout.WEIGHTS_FILE, lambda file: file.write_bytes(file.read_bytes()[:1000])),
    "zeros in place of weights": (layout.WEIGHTS_FILE, lambda file: file.write_bytes(bytes(file.stat().st_size))),
    **{
        f"no {name}": (name, Path.unlink)
        for name in (layout.GRAPH_FILE, layout.WEIGHTS_FILE, layout.SHAPE_FILE, layout.PROBE_FILE)
    },
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_packed_form_is_made_again(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    load(save_tiny_model(tmp_path, "llama"))
    damage(packed_folder(tmp_path) / name)
    assert_matches(load(tmp_path), reference("llama"), HISTORY)


def test_two_processes_may_pack_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may pack the same weights at once; the second to finish uses the first one's folder."""
    path = save_tiny_model(tmp_path, "llama")
    write = onnx_make._write

    def overtaken(model: Any, folder: Path, dtype: str) -> None:
        write(model, folder, dtype)
        shutil.copytree(folder, packed_folder(path))

    monkeypatch.setattr(onnx_make, "_write", overtaken)
    assert_matches(load(path), reference("llama"), HISTORY)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot keep its packed weights in .*/file/specdec/onnx"):
        load(path)


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with other logits than the model's is refused at loading.

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
    """A runtime that counts the positions of a sliding window otherwise is refused at loading.

    The usual test of 8 tokens would pass it, since they never leave a window of 512.
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
    """A window as long as the slots is left out, since the operator is slower with one."""
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
    """A pass that is filled up with unused tokens gives the logits that were asked for.

    It may end at the last position, after which no room is left to fill.
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
