"""A checkpoint directory is loaded as a backend, or refused with one clear line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec.inference.backends.onnx.shape import shape_of
from specdec.inference.backends.onnx.slots import OnnxSlots
from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.backends.registry import load_backend
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError
from specdec.inference.model.slots import ForkingBackend, Span
from tests.support.models import DEFAULT_VOCAB_SIZE, save_tiny_model, tiny_model
from tests.support.vitals import vitals


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path, "llama", seed=3)


def config_for(path: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(path, **{"device": "cpu", "num_threads": 1, **fields})


def test_a_loaded_model_gives_the_saved_logits(checkpoint: Path) -> None:
    backend = load_backend(config_for(checkpoint, num_slots=2, sequence_length=16))
    assert (backend.num_slots, backend.max_length, backend.vocab_size) == (2, 16, DEFAULT_VOCAB_SIZE)
    logits = backend.forward([Span(1, 0, (5, 6, 7), 3)])
    with torch.inference_mode():
        expected = tiny_model("llama", seed=3)(torch.tensor([[5, 6, 7]])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_length_defaults_to_the_models_own(checkpoint: Path) -> None:
    assert load_backend(config_for(checkpoint)).max_length == 128


@pytest.mark.parametrize(("dtype", "itemsize"), [("auto", 4), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_dtype_is_that_of_the_cache_too(checkpoint: Path, dtype: str, itemsize: int) -> None:
    backend = load_backend(config_for(checkpoint, dtype=dtype))
    assert backend.slot_bytes == 2 * 2 * 2 * 8 * 128 * itemsize
    assert backend.forward([Span(0, 0, (5,), 1)]).dtype == np.float32


def test_threads_are_set(checkpoint: Path) -> None:
    torch.set_num_threads(2)
    load_backend(config_for(checkpoint, num_threads=1))
    assert torch.get_num_threads() == 1


def edit_config(**fields: Any) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **fields}))

    return edit


def drop_a_weight(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def quantize(path: Path, *, method: str) -> None:
    """Name a quantization method in config.json, and delete the weights, which a refusal must not need."""
    edit_config(quantization_config={"quant_method": method, "bits": 4})(path)
    (path / "model.safetensors").unlink()


def shard(path: Path) -> None:
    """Turn a checkpoint into one whose index names two files of weights, of which only one exists."""
    (path / "model.safetensors").rename(path / "part-1.safetensors")
    names = {"model.norm.weight": "part-1.safetensors", "lm_head.weight": "part-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "no file named .*: complete it"),
    "truncated weights": (
        lambda path: (path / "model.safetensors").write_bytes(b"\x00" * 100),
        "header.*: complete it",
    ),
    "pickled weights": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        r"\.bin\), which are not read here: make safetensors of them by .*save_pretrained",
    ),
    **{
        f"quantized by {method}": (
            partial(quantize, method=method),
            rf"its weights are quantized \({method}\), which is not read here: take the checkpoint .*{way}",
        )
        for method, way in {"awq": "vLLM, which reads awq", "gptq": "int8", "fp8": "rescale_fp8"}.items()
    },
    "one shard missing": (shard, r"1 of 2 files of weights are missing, such as part-2\.safetensors; .*complete it"),
    "half a file": (
        lambda path: os.truncate(path / "model.safetensors", 20_000),
        r"model\.safetensors has 20000 bytes of \d+, by its header; .*complete it",
    ),
    "bad config": (
        lambda path: (path / "config.json").write_text('{"model_type": "llama",'),
        r"config\.json is not JSON .*complete it",
    ),
    "one weight missing": (drop_a_weight, r"1 weights are missing, such as model\.layers\.1\.mlp\.up_proj\.weight"),
    "more layers than weights": (edit_config(num_hidden_layers=3), "9 weights are missing"),
    "other shapes": (
        edit_config(vocab_size=DEFAULT_VOCAB_SIZE + 1),
        r"\[288, 32\] in the files, and \[289, 32\] by config\.json; take both from one model",
    ),
    "no model type": (lambda path: (path / "config.json").write_text("{}"), "model_type"),
    "an adapter beside it": (lambda path: (path / "adapter_config.json").write_text("{}"), "adapter"),
    "unknown architecture": (edit_config(model_type="unheard_of"), "unheard_of"),
    "not a language model": (edit_config(model_type="vit"), "ViTConfig"),
    "code of its own": (
        edit_config(model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "custom code, which is never run here",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(
    checkpoint: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    break_it, reason = BROKEN[case]
    break_it(checkpoint)
    with pytest.raises(ConfigError, match=f"(?i){reason}") as caught:
        load_backend(config_for(checkpoint))
    assert str(caught.value).startswith(f"model {checkpoint}: ")
    assert "\n" not in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)
    ours = [record for record in caplog.records if record.name.startswith("specdec.inference")]
    assert not ours, "a warning about backends came first, and gave the same reason"


def write(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{}")


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "model.gguf": (lambda path: path.write_bytes(b"GGUF"), "GGUF is not read here: take llama.cpp, or the checkpoint"),
    "adapter": (lambda path: write(path / "adapter_config.json"), "an adapter .* merge the two first"),
    ".": (lambda path: None, r"no config\.json there"),
    "nowhere/model": (lambda path: None, "no such directory: .* has no nowhere"),
    "model.safetensors": (lambda path: path.touch(), "a directory with config.json is expected"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_folders_without_a_model_name_the_way_out(tmp_path: Path, name: str) -> None:
    """The error about a path without a model says what is there, and what to pass instead.

    Regression: a GGUF file that exists was reported as "no such directory".
    """
    make, way_out = FOREIGN[name]
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=way_out):
        ModelConfig(tmp_path / name)


def test_an_unsupported_architecture_is_refused_early(checkpoint: Path) -> None:
    edit_config(model_type="mamba", architectures=["MambaForCausalLM"])(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM is not supported: it carries recurrent state"):
        load_backend(config_for(checkpoint))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sequence_length": 129},
            "sequence_length 129 is above the 128 positions of model .*: --beyond_positions goes beyond",
        ),
        ({"device": "abacus"}, "device abacus is not a torch device"),
        ({"device": "meta"}, "device meta is none of cpu, cuda, cuda:N and neuron"),
        ({"device": "cuda:99"}, "device cuda:99 is not among the"),
        ({"backend": "abacus"}, "backend abacus is none of .*torch"),
    ],
)
def test_settings_that_cannot_be_used_are_named(checkpoint: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_backend(config_for(checkpoint, **fields))


def test_too_long_sequences_are_refused_before_anything_is_loaded(checkpoint: Path) -> None:
    """A --sequence_length above the model's limit is refused before anything is loaded.

    Regression: backend auto logged a warning and went on to torch, which loaded the model only to refuse it.
    """
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="sequence_length 129 is above"):
        ModelConfig(checkpoint, backend="auto", sequence_length=129)


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_positions_beyond_the_models_are_served_if_asked_for(checkpoint: Path, backend: str) -> None:
    config = config_for(checkpoint, backend=backend, sequence_length=160, beyond_positions=True)
    token_ids = [2 + i % 250 for i in range(160)]
    logits = load_backend(config).forward([Span(0, 0, token_ids, 2)])
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0, -2:]
    np.testing.assert_allclose(np.asarray(logits), expected.numpy(), atol=1e-3)


def test_a_table_of_positions_has_no_beyond(tmp_path: Path) -> None:
    checkpoint = save_tiny_model(tmp_path, "gpt2")
    with pytest.raises(UnsupportedModelError, match="one token fails with IndexError"):
        load_backend(config_for(checkpoint, sequence_length=129, beyond_positions=True))


@pytest.mark.parametrize("max_length", [2**40, 2**60])  # more than a machine has; more than an address can hold
def test_slots_that_do_not_fit_into_memory_are_refused(max_length: int) -> None:
    model, message = tiny_model("llama"), f"4096 slots of {max_length} positions do not fit into the memory of cpu"
    with pytest.raises(ConfigError, match=message):
        TorchBackend(model, num_slots=4096, max_length=max_length)
    with pytest.raises(ConfigError, match=message):
        OnnxSlots(shape_of(model), num_slots=4096, max_length=max_length)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only /proc tells how much memory is in use")
@pytest.mark.parametrize("backend_name", ["onnx", "torch"])
def test_short_sequences_take_little_of_their_slots(backend_name: str, tmp_path: Path) -> None:
    """A short sequence takes little of its slot's memory.

    Regression: with memory pages of 2 MiB, the first request of each slot took all of the slot's memory, and up to
    18 times as long as with small pages.
    """
    save_tiny_model(tmp_path, "llama", num_key_value_heads=4, head_dim=64, max_position_embeddings=8192)
    config = config_for(tmp_path, backend=backend_name, num_slots=8, sequence_length=8192)
    before_mib = vitals(os.getpid()).rss_mib
    backend = load_backend(config)
    assert isinstance(backend, ForkingBackend)
    backend.forward([Span(slot, 0, range(10), 1) for slot in range(4)])
    for slot in range(4):
        backend.fork(slot, 4 + slot, 0, 10)
    backend.forward([Span(4 + slot, 10, (5,), 1) for slot in range(4)])
    assert vitals(os.getpid()).rss_mib - before_mib < 8 * backend.slot_bytes / 2**20 / 4


def test_packed_experts_of_gpt_oss_are_unpacked(tmp_path: Path) -> None:
    """Experts in MXFP4, the format in which gpt-oss is published, are read and unpacked without further packages.

    Transformers would need such packages.
    """
    paths = [save_tiny_model(tmp_path / name, "gpt_oss", intermediate_size=32) for name in ("packed", "plain")]
    stored = [load_file(path / "model.safetensors") for path in paths]
    for name in list(stored[0]):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, values = packed_experts(*stored[0].pop(name).shape)
            stored[0] |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            stored[1][name] = values
    for path, weights in zip(paths, stored, strict=True):
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((paths[0] / "config.json").read_text())
    kept = ["lm_head", "model.embed_tokens", "model.layers.*.self_attn", "model.layers.*.mlp.router"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (paths[0] / "config.json").write_text(json.dumps(config))
    spans = [Span(0, 0, range(5, 15), 10)]
    packed, plain = (load_backend(config_for(path, backend="torch")).forward(spans) for path in paths)
    np.testing.assert_array_equal(packed, plain)


def packed_experts(num_experts: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, ...]:
    """Return random MXFP4 weights: (blocks of two values a byte, a scale per 32 values, the same weights as floats).

    Blocks are [experts, outputs, inputs / 32, 16], scales [experts, outputs, inputs / 32], and floats
    [experts, inputs, outputs].
    """
    generator = torch.Generator().manual_seed(0)
    shape = num_experts, num_outputs, num_inputs // 32
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([levels, -levels])[torch.stack([blocks & 15, blocks >> 4], dim=4).long()].flatten(3)
    scaled = values * torch.exp2(scales.float() - 127)[..., None]
    return blocks, scales, scaled.flatten(2).transpose(1, 2).contiguous()
