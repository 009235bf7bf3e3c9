"""Folders that vLLM or NxDI's own demo compiled: each is one model, not a store of models.

In AWS's tutorials `NEURON_COMPILED_ARTIFACTS` points at such a folder. It records the settings of its compilation with
NxDI's names, and nothing about the checkpoint that its weights come from.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.inference.backends.neuron.checkpoints.shards import read_json
from specdec.inference.backends.neuron.storage.artifacts import differences
from specdec.inference.backends.neuron.storage.store import MANIFEST
from specdec.inference.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIG = "neuron_config.json"
_OF_NO_CONSEQUENCE = frozenset(
    ("_name_or_path", "name_or_path", "draft_model_path", "metadata", "quantized_checkpoints_path")
)
"""Settings that say where files are or were; they are ignored in all nested settings."""


def is_compiled_model(folder: Path) -> bool:
    """Return whether a folder is a model that another program compiled: no store, and no model of this project."""
    return (folder / CONFIG).is_file() and (folder / "model.pt").is_file() and not (folder / MANIFEST).is_file()


def check_fits(folder: Path, config: Any) -> None:
    """Refuse a folder that was compiled for other settings than `config`.

    Args:
        config: NxDI's InferenceConfig.

    Raises:
        ConfigError: settings differ; the message names all of them, with both values of each.
    """
    there, asked = read_json(folder / CONFIG), _as_saved(config)
    if found := differences(*_comparable(there, asked)):
        raise ConfigError(
            f"{folder} is a compiled model, but not for these settings: {'; '.join(found)}. Set what differs, or name "
            "a folder of compiled models"
        )
    logger.info(
        "compiled model %s: another program compiled it, and it does not name the checkpoint of its weights", folder
    )


def _as_saved(config: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config.save(f"{folder}/")
        return read_json(Path(folder, CONFIG))


def _comparable(there: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what to compare of both: NeuronConfig, a fused pair's settings, and other entries that both have."""
    return _stripped(there, beside=asked), _stripped(asked, beside=there)


def _stripped(settings: Mapping[str, Any], *, beside: Mapping[str, Any]) -> dict[str, Any]:
    stripped: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _OF_NO_CONSEQUENCE or name.endswith("transformers_version"):
            continue
        other = beside.get(name)
        if name == "neuron_config":
            stripped[name] = {key: each for key, each in value.items() if key not in _OF_NO_CONSEQUENCE}
        elif isinstance(value, Mapping):
            stripped[name] = _stripped(value, beside=other if isinstance(other, Mapping) else {})
        elif name in beside or name == "fused_spec_config":
            stripped[name] = value
    return stripped
