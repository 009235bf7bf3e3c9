"""`specdec doctor` and `specdec target` read a model's directory by the same code, and refuse it in the same words.

The directories have faults from public bug reports and from attacks; errors name the file, the field, and the way out.
"""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st

from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.cli.app import main
from tests.support.models import save_tiny_model

Change = Callable[[Path], None]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DEEP = "[" * 100_000
GIB = 1 << 30


def raw(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def text(name: str, content: str) -> Change:
    return raw(name, content.encode())


def fields(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        stored = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        given = {key: value for key, value in {**stored, **values}.items() if value is not GONE}
        (folder / name).write_text(json.dumps(given))

    return change


GONE = object()
GENERATION = "generation_config.json"


def config(**values: Any) -> Change:
    return fields("config.json", **values)


def header(**changes: Any) -> Change:
    """Return a function that changes model.norm.weight in the weights' header; fields of value `GONE` are removed."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        entry = {**entries["model.norm.weight"], **changes}
        entries["model.norm.weight"] = {key: value for key, value in entry.items() if value is not GONE}
        written = json.dumps(entries).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + content[8 + length :])

    return change


def sharded(index: dict[str, Any]) -> Change:
    def change(folder: Path) -> None:
        names = list(st.load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        whole = {"weight_map": dict.fromkeys(names, "part.safetensors"), **index}
        (folder / INDEX).write_text(json.dumps(whole))

    return change


def without(name: str) -> Change:
    def change(folder: Path) -> None:
        tensors = st.load_file(folder / WEIGHTS)
        del tensors[name]
        st.save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return change


def deep_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())


def deep_index(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    (folder / INDEX).write_text(DEEP)


def only_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    (folder / "tokenizer_config.json").unlink(missing_ok=True)


OWN = "take the model's own"
REFUSED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "generation config empty": (text(GENERATION, ""), (GENERATION, "not JSON", "complete it")),
    "generation config a list": (text(GENERATION, "[]"), (GENERATION, "JSON object", OWN)),
    "generation config not UTF-8": (raw(GENERATION, b'{"a": "\xe9"}'), (GENERATION, "not JSON")),
    "generation config deep": (text(GENERATION, DEEP), (GENERATION, "not JSON")),
    "end a text": (fields(GENERATION, eos_token_id="1"), (GENERATION, "eos_token_id must be a token id or a list of")),
    "end null in a list": (fields(GENERATION, eos_token_id=[1, None]), (GENERATION, "not [1, null]", OWN)),
    "end true": (config(eos_token_id=True), ("config.json: ", "eos_token_id", OWN)),
    "temperature": (fields(GENERATION, temperature=1e9), (GENERATION, "temperature", "--generation_config none")),
    "config deep": (text("config.json", DEEP), ("config.json is not JSON",)),
    "config of NaN sizes": (config(hidden_size=float("nan")), ("config.json: hidden_size", "not NaN", OWN)),
    "vocabulary smaller": (config(vocab_size=280), ("lm_head.weight", "[288, 32]", "[280, 32] by config.json", "both")),
    "vocabulary larger": (config(vocab_size=293), ("lm_head.weight", "[293, 32] by config.json", "from one model")),
    "vocabulary below 0": (config(vocab_size=-1), ("config.json: vocab_size", "1..", "not -1", OWN)),
    "hidden size": (config(hidden_size=64), ("[288, 32] in the files, and [288, 64] by config.json",)),
    "intermediate size": (config(intermediate_size=96), ("down_proj.weight", "by config.json", "from one model")),
    "a layer more": (config(num_hidden_layers=3), ("9 weights are missing", "model.layers.2.", "from one model")),
    "a billion layers": (config(num_hidden_layers=10**9), ("config.json: num_hidden_layers", "1..4096", OWN)),
    "a billion experts": (config(num_local_experts=10**9), ("config.json: num_local_experts", "0..4096", OWN)),
    "a billion layers within": (
        config(text_config={"model_type": "llama", "num_hidden_layers": 10**9}),
        ("config.json: num_hidden_layers", OWN),
    ),
    "no heads": (config(num_key_value_heads=0), ("config.json: num_key_value_heads", "not 0", OWN)),
    "heads left out": (config(num_key_value_heads=GONE), ("k_proj.weight", "[16, 32] in the files", "from one model")),
    "heads below 0": (config(head_dim=-1), ("config.json: head_dim", "not -1", OWN)),
    "window": (config(sliding_window="x"), ("config.json: sliding_window", 'not "x"', OWN)),
    "text without a type": (config(text_config={"hidden_size": 32}), ("config.json: ", OWN)),
    "rope": (config(rope_parameters={"rope_type": "nothing", "rope_theta": 1e4}), ("config.json: ", OWN)),
    "quantized by a long name": (
        config(quantization_config={"quant_method": "x" * 100_000}),
        ("quantized (xxx", "take the checkpoint that it was made of"),
    ),
    "no output layer": (without("lm_head.weight"), ("1 weights are missing, such as lm_head.weight", "from one model")),
    "index without metadata": (sharded({}), (INDEX, 'add "metadata": {}')),
    "index of lists": (sharded({"weight_map": {"a": ["part.safetensors"]}}), (INDEX, "weight_map", "complete it")),
    "index deep": (deep_index, (INDEX, "not JSON")),
    "header deep": (deep_header, (f"the header of {WEIGHTS}", "complete it")),
    "header without a shape": (header(shape=GONE), (f"the header of {WEIGHTS}", "complete it")),
    "header with texts": (header(shape=["32"]), (f"the header of {WEIGHTS}", "complete it")),
    "header with 2**62": (header(shape=[2**62]), (f"the header of {WEIGHTS}", "complete it")),
    "pointer": (
        text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        (WEIGHTS, "Git LFS", "`git lfs pull`"),
    ),
    "tokenizer.model alone": (
        only_sentencepiece,
        ("its tokenizer cannot be loaded", "sentencepiece", "tokenizer.json"),
    ),
    "tokenizer deep": (text("tokenizer.json", DEEP), ("its tokenizer cannot be loaded",)),
}


def refusals(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return (error of `specdec doctor`, error of a target) for a directory that both must refuse."""
    assert main(["--role", "doctor", str(folder)]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("target"))
    assert main(["--role", "target", "--model", str(folder), "--port", "0"]) == 2
    return line.removeprefix("target  NOT served: "), capsys.readouterr().err.strip().removeprefix("error: ")


@pytest.mark.parametrize("name", REFUSED)
def test_doctor_and_target_refuse_in_the_same_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Doctor and target refuse a faulty directory with the same error, which names the file, field and way out.

    Regression: doctor called 18 of these directories served and ended with a traceback for 11 others, and a target
    ended with a traceback that named no file.
    """
    change, parts = REFUSED[name]
    folder = save_tiny_model(tmp_path, "llama")
    change(folder)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    doctor, target = refusals(folder, capsys)
    assert doctor == target
    assert "\n" not in doctor
    assert len(doctor) < 800
    assert str(folder) in doctor
    assert [part for part in parts if part not in doctor] == [], doctor
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 < GIB


SERVED: dict[str, Change] = {
    "as it is": lambda _: None,
    "index with metadata": sharded({"metadata": {}}),
    "null sizes": config(sliding_window=None, head_dim=None, pad_token_id=None),
    "list of ends": fields(GENERATION, eos_token_id=[1, 2]),
    "an odd field": config(architectures=None, use_last_layer=True, best_layer="x"),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_doctor_serves_what_is_whole(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    SERVED[name](folder)
    assert main(["--role", "doctor", str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral", "qwen3", "gpt_oss", "phi3"])
def test_headers_fit_models_of_all_kinds(family: str, tmp_path: Path) -> None:
    """Weights with other names, because they are tied, fused or joined, are not reported as missing."""
    from specdec.inference.backends.checkpoint import load_config, require_fitting

    folder = save_tiny_model(tmp_path, family)
    require_fitting(folder, load_config(folder))
    assert CheckpointFiles(folder).num_parameters > 0
