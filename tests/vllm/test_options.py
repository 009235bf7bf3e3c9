"""Tests of wrong vLLM flags, which are refused before anything is started, in one line that names the flag."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.inference.errors import ConfigError, IncompatibleDraftError
from specdec.inference.request import Noise, Provenance
from specdec.inference.vllm.options import VllmModel, check_flags, engine_config
from tests.support.models import tiny_tokenizer
from tests.vllm.conftest import FLAGS, Pair


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--max-model-length 64", "did you mean --max-model-len?"),
        ("--speculative-config {}", "draft workers of ours"),
        ("--enable-lora --lora-modules poet=/", "no adapter_config.json"),
    ],
)
def test_a_flag_is_refused_before_vllm_is_imported(flags: str, part: str) -> None:
    with pytest.raises(ConfigError, match="--") as caught:
        check_flags(flags.split())
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--dtype float33", "--dtype: invalid choice: 'float33'"),
        ("--max-model-len 9999", "max_model_len (9999)"),
        ("--gpu-memory-utilization 3", "gpu_memory_utilization 3.0: "),
        ("--compilation-config {no", "--compilation-config"),
        ("--dtype float32 --quantization fp8", "--dtype float32: "),
        ("--quantization awq", "--quantization awq: "),
        ("--tensor-parallel-size 3", "tensor parallel size (3)"),
        ("--logprobs-mode processed_logprobs", "--logprobs-mode processed_logprobs: take raw_logprobs"),
    ],
)
def test_what_vllm_refuses_becomes_one_line(pair: Pair, flags: str, part: str) -> None:
    """An error of vLLM about its flags becomes one line that names the flag.

    Regression: pydantic's errors lost the name of the field, and a list of all models filled the screen.
    """
    with pytest.raises(ConfigError) as caught:
        engine_config(VllmModel(pair.target, flags.split()))
    message = caught.value.message
    assert part in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.release
def test_a_hybrid_model_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig

    sizes = {"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 4, "num_experts": 2}
    Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], **sizes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="layers with a state"):
        engine_config(VllmModel(tmp_path))


def test_vllms_metrics_have_the_name_that_ours_have(pair: Pair) -> None:
    """The metrics of vLLM itself have the same `model_name` as this project's: the folder's name.

    Regression: vLLM's figures had a path as `model_name`, so that panels by name lost half of them.
    """
    assert engine_config(VllmModel(pair.target, FLAGS)).model_config.served_model_name == pair.target.name


def test_no_stream_goes_on_by_another_law() -> None:
    """A server refuses to continue another server's stream whose tokens are drawn by another rule than its own.

    There are three: vLLM's runner V1 with this project's random numbers or with vLLM's, and runner V2 with vLLM's.
    """
    from specdec.inference.serving.vllm_target import laws

    words = SimpleNamespace(dtype="torch.float32", quantization=None, max_model_len=128)
    found = [
        Provenance(
            "/".join(laws(SimpleNamespace(model_config=words, use_v2_model_runner=is_v2), frozenset({1}), noise))
        )
        for is_v2, noise in ((False, Noise.SPECDEC), (False, Noise.VLLM), (True, Noise.VLLM))
    ]
    for begun in found:
        begun.require_same(begun)
        for here in found:
            if here is not begun:
                with pytest.raises(IncompatibleDraftError, match="cannot resume"):
                    begun.require_same(here)
