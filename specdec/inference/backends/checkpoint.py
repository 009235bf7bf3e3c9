"""Reader of the configuration and the weights in a Hugging Face directory; it never uses the network.

Owns the translation of Transformers' exceptions and warnings into one clear line. Knows nothing of slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import ConfigError

MAX_REASON_LENGTH = 300


def load_config(path: Path) -> PretrainedConfig:
    """Read `config.json`.

    Raises:
        ConfigError: the file cannot be read, or names an architecture that Transformers does not know.
    """
    with _blaming(path):
        # Unless trust_remote_code is False, Transformers asks on the terminal whether to run the checkpoint's own code.
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_weights(
    path: Path, model_config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build the model and read all of its weights.

    Raises:
        ConfigError: a file is missing or broken, or does not hold every weight.
    """
    disable_progress_bar()  # a server's log is not a terminal
    CheckpointFiles(path).require_weights()
    quantization = getattr(model_config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        quantization["dequantize"] = True  # gpt-oss; packed experts need kernels that only some GPUs have
    with _blaming(path):
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # a .bin is a pickle
            low_cpu_mem_usage=True,
            output_loading_info=True,
        )
    # Transformers fills missing weights with noise and only warns.
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(f"model {path}: {len(missing)} weights are missing, such as {missing[0]}")
    return model.to(device)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turn any exception of Transformers in the block into a ConfigError of one line that names the checkpoint."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
        if "contains custom code" in reason or "trust_remote_code" in reason:
            reason = "it has custom code, which is never run here; take a model that Transformers knows by itself"
        raise ConfigError(f"model {path}: {reason}") from error
