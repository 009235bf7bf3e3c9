"""OpenVINO GenAI with continuous batching: without a draft, with a draft model, and with prompt lookup."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.child import Generate, Loaded, Setup, answer

LENGTHS = (4, 8, 16)
CONFIDENCE = 0.4
"""Confidence in a draft token below which a proposal ends; the value is OpenVINO's default."""
NGRAM = 3
BLOCK = 32
"""Positions in a block of OpenVINO's KV cache on CPUs."""


def load(setup: Setup) -> Loaded:
    """Load the models; return OpenVINO's variants: without a draft, with a draft model, and with prompt lookup.

    The draft model's proposals have fixed lengths, or end where its confidence is low.
    """
    target, draft = (str(setup.converted(name, partial(_export, setup.dtype))) for name in ("target", "draft"))
    properties = _properties(setup.dtype)
    plain, drafted, looked_up = (
        _pipeline(target, setup, {**properties, **method})
        for method in (
            {},
            {"draft_model": openvino_genai.draft_model(draft, "CPU", **properties)},
            {"prompt_lookup": True},
        )
    )
    variants: dict[str, Generate] = {
        "plain": partial(_generate, plain, {}),
        **{f"draft {length}": partial(_generate, drafted, {"num_assistant_tokens": length}) for length in LENGTHS},
        "draft by confidence": partial(_generate, drafted, {"assistant_confidence_threshold": CONFIDENCE}),
        "prompt lookup": partial(_generate, looked_up, {"num_assistant_tokens": 8, "max_ngram_size": NGRAM}),
    }
    return Loaded(variants, {name: version(name) for name in ("openvino-genai", "openvino", "optimum-intel", "nncf")})


def _export(dtype: str, checkpoint: str, folder: Path) -> None:
    """Convert a checkpoint to OpenVINO's format; int8 quantizes only the weights, with a scale per output."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", checkpoint]
    bits = "int8" if dtype == "int8" else "fp32"
    task = ["--task", "text-generation-with-past", "--weight-format", bits]
    subprocess.run([*command, *task, str(folder)], check=True, stdout=subprocess.DEVNULL)


def _properties(dtype: str) -> Mapping[str, Any]:
    """Return OpenVINO's settings; with int8, OpenVINO chooses the types of activations, keys and values."""
    common = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return common | (exact if dtype == "float32" else {})


def _pipeline(model: str, setup: Setup, properties: Mapping[str, Any]) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = setup.num_streams * (setup.length // BLOCK + 1)
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", dict(properties))


def _generate(
    pipeline: Any, options: Mapping[str, Any], prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, **options)
    inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    return [result.m_generation_ids[0] for result in pipeline.generate(inputs, [config] * len(inputs))]


if __name__ == "__main__":
    answer(load)
