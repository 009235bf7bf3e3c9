"""Fixtures of tests that run the real vLLM, which `make test-vllm` installs into an environment of its own."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")
import pytest_asyncio

from specdec.inference.config import ROOT, ServerConfig
from specdec.inference.request import Noise
from specdec.inference.vllm.hooks import VARIABLE
from specdec.inference.vllm.options import VllmModel, prepare_environment

prepare_environment("info")
SETTINGS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ.update(SETTINGS, HF_HUB_OFFLINE="1", DO_NOT_TRACK="1")
INTERPRETED = {
    VARIABLE: "1",
    "TRITON_INTERPRET": "1",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "0",  # vLLM's kernel for it calls CUDA's library
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support" / "triton_cpu"), os.environ.get("PYTHONPATH", "")]),
}
"""Environment variables by which vLLM uses its model runner V2 on a CPU, with Triton's kernels interpreted."""

LAW = Noise.VLLM if os.environ.get(VARIABLE) == "1" else Noise.SPECDEC
"""How vLLM's model runner, V1 or V2 by the environment, draws random numbers from a request's seed and position."""
MAX_LENGTH = 128
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", str(MAX_LENGTH)),
    *("--block-size", "32", "--num-gpu-blocks-override", "9", "--max-num-batched-tokens", "64"),
)
"""Flags of vLLM for so little KV cache that requests are preempted, and such short passes that prompts take several."""
WORKER_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""vLLM's environment variable that, set to "0", lets an engine core run its only worker in its own process.

So it is on one GPU. On a CPU the default is a process for the worker; core and worker then wait for each other in loops
that take a whole processor each, and go on for a second after the last request.
"""
os.environ.setdefault(WORKER_PROCESS, "0")


@dataclass(frozen=True, slots=True)
class Pair:
    """Directories of a target, of a draft that is often right, and of LoRA adapters of the target.

    Attributes:
        adapter: an adapter that changes the target's texts.
        merged: the target with the weights of `adapter` added to its own.
        broken: an adapter of the last layer that makes every logit infinite or NaN, and leaves cached values finite.
    """

    target: Path
    draft: Path
    adapter: Path
    merged: Path
    broken: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of vLLM for serving the target with its adapters, under the names `other` and `broken`."""
        broken = json.dumps({"name": "broken", "path": str(self.broken)})
        room = ("--max-num-batched-tokens", "68")  # of a pass: 1 + gamma for each request, or vLLM refuses adapters
        return (*FLAGS, *room, "--enable-lora", "--lora-modules", f"other={self.adapter}", broken)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Save a tiny target, draft and adapters, with attention heads of a size that vLLM supports on a CPU."""
    from tests.support.models import disturbed, save_tiny_model, tiny_model, tiny_tokenizer

    root = tmp_path_factory.mktemp("pair")
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32}
    draft = root / "draft"
    disturbed(tiny_model("llama", seed=1, **sizes)).save_pretrained(draft)
    tiny_tokenizer().save_pretrained(draft)
    target = save_tiny_model(root / "target", "llama", seed=1, **sizes)
    merged = tiny_model("llama", seed=1, **sizes)
    save_adapter(root / "adapter", merged)
    merged.save_pretrained(root / "merged")
    tiny_tokenizer().save_pretrained(root / "merged")
    last = tiny_model("llama", seed=1, **sizes).model.layers[-1].mlp
    save_adapter(root / "broken", last, f"model.layers.{len(merged.model.layers) - 1}.mlp.", scale=float("nan"))
    return Pair(target, draft, root / "adapter", root / "merged", root / "broken")


def save_adapter(folder: Path, model: Any, prefix: str = "", *, scale: float = 0.5) -> None:
    """Save a random LoRA adapter of a model in the format of the library peft, and add its weights to the model.

    Args:
        prefix: beginning of the layers' names, if `model` is a part of a larger one.
        scale: factor on the adapter's weights; NaN makes it unusable.
    """
    import torch
    from safetensors.torch import save_file

    generator, rank = torch.Generator().manual_seed(9), 8
    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            low = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
            high = torch.randn(module.out_features, rank, generator=generator) * scale
            weights |= {
                f"base_model.model.{prefix}{name}.lora_{part}.weight": each for part, each in (("A", low), ("B", high))
            }
            with torch.no_grad():
                module.weight += 2.0 * high @ low  # lora_alpha / r
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(pair: Pair) -> AsyncGenerator[Any, None]:
    """Run vLLM under this project's engine for the tests, in child processes; yield the engine."""
    from specdec.inference.serving.vllm_target import vllm_engine

    async with vllm_engine(VllmModel(pair.target, FLAGS, gamma=16), ServerConfig(max_waiting=2)) as (running, _):
        yield running.engine
