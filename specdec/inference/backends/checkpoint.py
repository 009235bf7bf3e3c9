"""Reader of the configuration and the weights in a Hugging Face directory; it never uses the network.

Exceptions and warnings of Transformers become a ConfigError of one line. The KV cache is not this module's concern.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from specdec.inference.backends.architectures import DEFAULT_LENGTH, reasons
from specdec.inference.checkpoint_files import OWN, CheckpointFiles
from specdec.inference.errors import ConfigError

MAX_REASON_LENGTH = 300
CONFIG = "config.json"


def load_config(path: Path) -> PretrainedConfig:
    """Return the configuration in `config.json` of the checkpoint at `path`.

    Raises:
        ConfigError: the file cannot be read, or names an architecture that Transformers does not know.
    """
    CheckpointFiles(path).require_model()  # before a forged number fills the memory
    with _blaming(path, CONFIG):
        # Unless trust_remote_code is False, Transformers asks on the terminal whether to run the checkpoint's own code.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _ = [*reasons(config, DEFAULT_LENGTH, windows=True)]  # here an odd field has a file to blame
        return config


def require_fitting(path: Path, model_config: PretrainedConfig) -> None:
    """Raise ConfigError if the stored weights are not those of the model that config.json describes.

    Only the headers of the weight files are read, for names and shapes. If the files have names that the model lacks,
    because Transformers renames or joins weights as it loads them, weights of equal names are compared by shape, and
    missing weights are not looked for. Quantized checkpoints are not checked.
    """
    files = CheckpointFiles(path)
    if files.quantization is not None:
        return
    with _blaming(path, CONFIG), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(model_config), trust_remote_code=False)
    wanted, stored = model.state_dict(keep_vars=True), files.shapes
    for name in sorted(wanted.keys() & stored.keys()):
        if (shape := tuple(wanted[name].shape)) != stored[name]:
            found = f"{name} has the shape {list(stored[name])} in the files, and {list(shape)} by config.json"
            raise ConfigError(f"model {path}: {found}; take both from one model")
    if stored.keys() <= wanted.keys():
        _require_all(path, [*_absent(model, wanted, stored.keys())])


def _absent(model: PreTrainedModel, wanted: Mapping[str, Any], stored: Collection[str]) -> Iterator[str]:
    """Yield names of weights that are not stored, and are tied to no weight that is, unless the model may lack them.

    Args:
        wanted: the model's weights by name; tied ones are one object under several names.
        stored: names of the weights in the checkpoint's files.
    """
    tied = defaultdict[int, bool](bool)
    for name, weight in wanted.items():
        tied[id(weight)] |= name in stored
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for name, weight in wanted.items():
        if not tied[id(weight)] and not any(re.search(pattern, name) for pattern in ignored):
            yield name


def _require_all(path: Path, missing: Sequence[str]) -> None:
    if missing:
        shown = f"{len(missing)} weights are missing, such as {min(missing)}"
        raise ConfigError(f"model {path}: {shown}; take them and config.json from one model")


def load_weights(
    path: Path, model_config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build the model, read all of its weights, and return it on `device`.

    Raises:
        ConfigError: a file is missing or broken, does not hold every weight, or does not fit config.json.
    """
    disable_progress_bar()  # a server's log is not a terminal
    CheckpointFiles(path).require_weights()
    require_fitting(path, model_config)
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
    _require_all(path, [*report["missing_keys"]])
    return model.to(device)


@contextmanager
def _blaming(path: Path, file: str = "") -> Iterator[None]:
    """Turn any exception of the block but a ConfigError into a one-line ConfigError that names the checkpoint.

    The message names `file` too, unless that is empty.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
        if "contains custom code" in reason or "trust_remote_code" in reason:
            reason = "it has custom code, which is never run here; take a model that Transformers knows by itself"
        elif file:
            reason = f"{file}: {reason}; {OWN}"
        raise ConfigError(f"model {path}: {reason}") from error
