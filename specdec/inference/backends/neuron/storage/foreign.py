"""Folders that vLLM or NxDI's own demo compiled: each is one model, not a store of models.

In AWS's tutorials `NEURON_COMPILED_ARTIFACTS` points at such a folder. It records the settings of its compilation with
NxDI's names, and nothing about the checkpoint that its weights come from.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from specdec.inference.backends.neuron.checkpoints.shards import read_json
from specdec.inference.backends.neuron.storage.artifacts import differences, flat
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
    there, asked = dict(flat(read_json(folder / CONFIG))), dict(flat(_as_saved(config)))
    names = [name for name in there.keys() | asked.keys() if _matters(name, is_in_both=name in there and name in asked)]
    if found := differences(*({name: settings.get(name) for name in names} for settings in (there, asked))):
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


def _matters(name: str, *, is_in_both: bool) -> bool:
    """Return whether a compiled model fits only if it was compiled with the value of this setting that is asked for.

    This is so for all settings of NeuronConfig, and for the others that both programs record. It is not so for versions
    of Transformers, and for settings that say where files are.

    Args:
        name: name of the setting, after those of the settings that it is nested in, joined by dots.
        is_in_both: whether both programs record the setting.
    """
    parts = name.split(".")
    if not _OF_NO_CONSEQUENCE.isdisjoint(parts) or name.endswith("transformers_version"):
        return False
    return is_in_both or "neuron_config" in parts or name == "fused_spec_config"
