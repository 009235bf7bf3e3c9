"""A public fp8 checkpoint is converted to Neuron's format; a server refuses a checkpoint that was not converted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.inference.backends.neuron.backend import load_neuron_backend
from specdec.inference.backends.neuron.checkpoints import rescaling
from specdec.inference.backends.neuron.checkpoints.fp8 import HALVED, has_nan, is_beyond_neuron, num_lost
from specdec.inference.backends.neuron.checkpoints.fp8_checkpoint import MARK, check_rescaled
from specdec.inference.backends.neuron.checkpoints.rescaling import PROGRESS, rescale
from specdec.inference.checkpoint_files import INDEX
from specdec.inference.cli.app import main
from specdec.inference.errors import ConfigError
from tests.support.neuron.slot_models import checkpoint, neuron_config
from tests.unit.backends.neuron.test_loading import quantized

Tensors = dict[str, torch.Tensor]
FINITE = bytes(byte for byte in range(256) if byte & 0x7F != 0x7F)
SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def e4m3(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn)


def weight(rows: int = 4, seed: int = 0) -> torch.Tensor:
    """Return weights of type float8_e4m3fn [rows, 256], with every finite value in every row, in random order."""
    order = np.random.default_rng(seed)
    data = [bytes(order.permutation(np.frombuffer(FINITE + b"\0\0", np.uint8))) for _ in range(rows)]
    return e4m3(b"".join(data)).reshape(rows, 256)


def save(folder: Path, *shards: Tensors, **config: Any) -> Path:
    """Save a checkpoint with these shards, an index and further fields `config` of its config.json; return `folder`."""
    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for name, tensors in zip(SHARDS, shards, strict=False):
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Return the folder of a new checkpoint of three files; the second weight has its scale in the third file."""
    model = save(
        tmp_path / "public",
        {"a.weight": weight(), "a.weight_scale": torch.rand(4, 1), "norm.weight": torch.rand(8).bfloat16()},
        {"b.weight": weight(seed=1), "b.input_scale": torch.tensor(0.5), "b.input_scale_ub": torch.tensor(1200.0)},
        {"b.weight_scale": torch.tensor(0.25), "c.weight_scale": torch.tensor(3.0), "k_scale": torch.tensor(2.0)},
    )
    for name in SHARDS:
        (model / name).chmod(0o644)
    return model


def loaded(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rescaled(model: Path, output: Path) -> list[str]:
    return list(rescale(model, output))


def test_every_finite_value_is_halved_as_torch_rounds_it() -> None:
    """Halves of all finite fp8 values round as in torch, and `num_lost` counts the values that lose a bit."""
    halved = FINITE.translate(HALVED)
    expected = (e4m3(FINITE).double() / 2).to(torch.float8_e4m3fn)
    assert halved == expected.view(torch.uint8).numpy().tobytes()
    assert not is_beyond_neuron(halved)
    lost = (e4m3(halved).double() * 2 != e4m3(FINITE).double()).sum().item()
    assert num_lost(FINITE) == lost == 16
    assert (e4m3(halved).double() * 2 - e4m3(FINITE).double()).abs().max() == 2**-9


def test_nan_and_what_neuron_lacks_are_seen() -> None:
    assert [has_nan(bytes([byte])) for byte in range(256)] == e4m3(bytes(range(256))).float().isnan().tolist()
    large = e4m3(FINITE).float().abs() > 240
    assert [is_beyond_neuron(bytes([byte])) for byte in FINITE] == large.tolist()


def test_a_rescaled_checkpoint_keeps_every_product_of_weight_and_scale(public: Path, tmp_path: Path) -> None:
    lines = rescaled(public, tmp_path / "out")
    old, new = loaded(public), loaded(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in old.items()} == {name: tensor.dtype for name, tensor in new.items()}
    for layer in "ab":
        before, after = (
            each[f"{layer}.weight"].double() * each[f"{layer}.weight_scale"].double() for each in (old, new)
        )
        is_kept = before == after
        assert (~is_kept).sum() == 4 * 16
        assert is_kept[old[f"{layer}.weight"].float().abs() >= 2**-5].all()
        assert new[f"{layer}.weight"].float().abs().max() == 224
    assert new["b.input_scale"] == 1.0
    for name in ("norm.weight", "b.input_scale_ub", "c.weight_scale", "k_scale"):
        assert torch.equal(old[name], new[name])
    assert len(lines) == 4
    assert lines[0] == f"1/3 {SHARDS[0]}  1024 fp8 values, 64 of them, near 0, lost a bit"
    assert json.loads((tmp_path / "out/config.json").read_text()) == {
        "model_type": "llama",
        MARK: {"maximum": 240, "num_values": 2048, "num_lost": 128},
    }
    assert (tmp_path / "out/tokenizer.json").exists()
    assert (tmp_path / "out" / SHARDS[0]).stat().st_mode == (public / SHARDS[0]).stat().st_mode
    assert (tmp_path / "out" / INDEX).read_bytes() == (public / INDEX).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("a.weight_scale", ()),
        ("a.weight_scale", (1,)),
        ("a.weight_scale", (4,)),
        ("a.weight_scale", (4, 1)),
        ("a.weight_scale_inv", (2, 3)),
        ("a.scale", (1, 256)),
    ],
)
def test_every_kind_of_scale_is_doubled(tmp_path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = save(tmp_path / "model", {"a.weight": weight(), name: torch.rand(shape).to(dtype)})
    rescaled(model, tmp_path / "out")
    old, new = loaded(model)[name], loaded(tmp_path / "out")[name]
    assert new.dtype == dtype
    assert torch.equal(new, old * 2)


def test_a_fused_expert_tensor_keeps_its_scale(tmp_path: Path) -> None:
    experts = weight().reshape(2, 2, 256)
    model = save(tmp_path / "model", {"up_proj": experts, "up_proj_scale_inv": torch.ones(2, 1, 2)})
    rescaled(model, tmp_path / "out")
    assert loaded(tmp_path / "out")["up_proj_scale_inv"].tolist() == [[[2.0, 2.0]]] * 2


@pytest.mark.parametrize("num_done", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["before the name", "behind the name"])
def test_a_killed_run_goes_on(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int, where: str
) -> None:
    """A conversion that was killed at any file continues there, and gives the files of an uninterrupted one.

    It is killed when `num_done` files are done, just before or just after the next file gets its final name.
    """
    rescaled(public, tmp_path / "whole")
    lines, out = rescale(public, tmp_path / "out"), tmp_path / "out"
    for _ in range(num_done):
        next(lines)
    with monkeypatch.context() as patch:
        place, name = {"before the name": (os, "fsync"), "behind the name": (rescaling, "_write_json")}[where]
        patch.setattr(*((place, name) if num_done < 3 else (rescaling, "_copy_others")), killed)
        with pytest.raises(KeyboardInterrupt):
            next(lines)
    assert not (out / "config.json").exists()
    untouched = {name: (out / name).stat().st_mtime_ns for name in SHARDS[:num_done]}
    again = rescaled(public, out)
    assert [line.endswith("done before") for line in again] == [True] * num_done + [False] * (4 - num_done)
    assert {name: (out / name).stat().st_mtime_ns for name in untouched} == untouched
    assert contents(out) == contents(tmp_path / "whole")


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_file_that_changed_is_done_again(public: Path, tmp_path: Path) -> None:
    rescaled(public, tmp_path / "out")
    save_file({"a.weight": weight(seed=7), "a.weight_scale": torch.rand(4, 1)}, public / SHARDS[0])
    again = rescaled(public, tmp_path / "out")
    assert [line.endswith("done before") for line in again] == [False, True, True, False]
    rescaled(public, tmp_path / "fresh")
    assert (tmp_path / "out" / SHARDS[0]).read_bytes() == (tmp_path / "fresh" / SHARDS[0]).read_bytes()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight": e4m3(b"\x7f"), "a.weight_scale": torch.ones(1)}, r"a\.weight holds NaN \(0x7f or 0xff\)"),
        ({"a.weight": e4m3(b"\xff"), "a.weight_scale": torch.ones(1)}, r"a\.weight holds NaN \(0x7f or 0xff\)"),
        ({"a.weight": weight()}, r"a\.weight is fp8 and has 0 scales, one is needed: none"),
        (
            {"a.weight": weight(), "a.weight_scale": torch.ones(1), "a.scale": torch.ones(1)},
            r"has 2 scales, one is needed: a\.weight_scale, a\.scale",
        ),
        (
            {"a.weight": weight(), "a.weight_scale": torch.ones(5)},
            r"a\.weight_scale has shape \(5,\), its weight \(4, 256\): neither per tensor",
        ),
        (
            {"a.weight": weight(), "a.weight_scale": torch.ones(1).int()},
            r"a\.weight_scale has dtype I32, known are F64, F32, F16, BF16",
        ),
        (
            {"a.weight": weight(), "a.weight_scale": torch.tensor(6e4).half()},
            r"a\.weight_scale is too large to be doubled in torch\.float16",
        ),
        ({"a.weight": torch.ones(2, 2)}, r"has no weights of dtype F8_E4M3 .*nothing to rescale"),
    ],
)
def test_a_tensor_that_cannot_be_rescaled_is_named(tmp_path: Path, tensors: Tensors, message: str) -> None:
    model = save(tmp_path / "model", tensors)
    with pytest.raises(ConfigError, match=message):
        rescaled(model, tmp_path / "out")
    assert not (tmp_path / "out/config.json").exists()


def test_damaged_checkpoints_are_named(public: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        rescaled(tmp_path / "nowhere", tmp_path / "out")
    (public / SHARDS[1]).write_bytes((public / SHARDS[1]).read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{SHARDS[1]} has \d+ bytes of \d+, by its header"):
        rescaled(public, tmp_path / "out")
    (public / SHARDS[1]).unlink()
    with pytest.raises(ConfigError, match=f"{SHARDS[1]} cannot be read"):
        rescaled(public, tmp_path / "out")
    for index in ("{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'):
        (public / INDEX).write_text(index)
        with pytest.raises(ConfigError, match="has no weight_map with the file of each weight"):
            rescaled(public, tmp_path / "out")


def test_rescaling_never_overwrites_another_checkpoint(public: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the model itself"):
        rescaled(public, public)
    other = save(tmp_path / "other", {"a.weight": torch.ones(2)})
    with pytest.raises(ConfigError, match="other holds another checkpoint"):
        rescaled(public, other)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be written"):
        rescaled(public, tmp_path / "file")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / PROGRESS).write_text('{"else.safetensors": {}}')
    with pytest.raises(ConfigError, match="holds parts of another checkpoint"):
        rescaled(public, tmp_path / "parts")


def test_rescale_fp8_runs_twice_and_refuses_its_own_result(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(model: Path, output: Path) -> int:
        return main(["--role", "rescale_fp8", "--model", str(model), "--output", str(output)])

    assert run(public, tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("2048 fp8 values, 128 of them, near 0, lost a bit")
    assert run(public, tmp_path / "out") == 0
    assert capsys.readouterr().out.count("done before") == 3
    assert run(tmp_path / "out", tmp_path / "twice") == 2
    assert "was rescaled before" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


def test_an_unrescaled_checkpoint_is_refused_with_the_command(
    public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = quantized(public, "per_channel_symmetric", quantization_dtype="f8e4m3")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=f"specdec rescale_fp8 --model {public} --output {public}-rescaled"):
        load_neuron_backend(neuron_config(checkpoint("llama"), **settings))
    rescaled(public, out)
    check_rescaled(out)
    assert "is not marked" not in caplog.text
    shutil.copyfile(public / "config.json", out / "config.json")  # rescaled by another tool
    check_rescaled(out)
    assert "is not marked as rescaled to Neuron's fp8, but is used" in caplog.text


def test_checkpoints_without_fp8_are_not_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_rescaled(tmp_path / "quantized.pt")
    check_rescaled(save(tmp_path / "model", {"a.weight": torch.ones(2)}))
    assert not caplog.text
