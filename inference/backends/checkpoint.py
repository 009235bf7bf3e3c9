"""Reader of a Hugging Face directory: its configuration and its weights; never the network.

Owns the translation of Transformers' exceptions and warnings into one clear line. Knows nothing of slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from inference.errors import ConfigError

MAX_REASON_LENGTH = 300


def load_config(path: Path) -> PretrainedConfig:
    """Read `config.json`.

    Raises:
        ConfigError: it cannot be read, or names an architecture that Transformers does not know.
    """
    with _blaming(path):
        # Without trust_remote_code=False Transformers asks on the terminal whether to run the checkpoint's own code.
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_weights(
    path: Path, model_config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build the model and read all of its weights.

    Raises:
        ConfigError: a file is missing or broken, or does not hold every weight.
    """
    disable_progress_bar()  # a server's log is not a terminal
    if (path / "adapter_config.json").is_file():  # where PEFT is installed, it may name another model's directory
        raise ConfigError(f"model {path} is an adapter (adapter_config.json): merge it into its model first")
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
    """Turn Transformers' exceptions about a checkpoint into one line; they have no common root."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
        raise ConfigError(f"model {path}: {_way_out(path, reason)}") from error


def _way_out(path: Path, reason: str) -> str:
    """Return Transformers' reason with what to do about it, or a better one."""
    if "contains custom code" in reason or "trust_remote_code" in reason:
        return "it has custom code, which is never run here; take a model that Transformers knows by itself"
    if not any(path.glob("*.safetensors")) and any(path.glob("*.bin")):
        convert = f"AutoModelForCausalLM.from_pretrained('{path}').save_pretrained('{path}-safe')"
        return f"its weights are pickles (.bin), which are not read here: make safetensors of them by {convert}"
    if (method := _quantization(path)) is not None:
        return (
            f"{reason}; its weights are quantized ({method}): take the original checkpoint, with --dtype int8 on a CPU"
        )
    is_cut = "header" in reason.lower() or "file named" in reason
    return f"{reason}; a download that ended early looks like this: complete it" if is_cut else reason


def _quantization(path: Path) -> str | None:
    """Return the method of a quantized checkpoint."""
    with suppress(OSError, ValueError, AttributeError):
        stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return str(stored["quantization_config"]["quant_method"]) if stored.get("quantization_config") else None
    return None
