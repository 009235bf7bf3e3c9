"""Configuration classes in the double of NxDI: NeuronConfig, InferenceConfig, and the one for a fused pair's draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG_FILE = "neuron_config.json"
DEFAULTS: dict[str, Any] = {
    "batch_size": 1,
    "seq_len": 128,
    "tp_degree": 1,
    "torch_dtype": "bfloat16",
    "apply_seq_ids_mask": False,
    "enable_bucketing": False,
    "context_encoding_buckets": None,
    "token_generation_buckets": None,
    "speculation_length": 0,
    "enable_fused_speculation": False,
    "enable_eagle_speculation": False,
    "output_logits": False,
    "on_device_sampling_config": None,
}
"""Settings of NeuronConfig that the double reads, with NxDI's default values."""


class NeuronConfig:
    """Settings of a compilation. As in NxDI, any keyword is accepted; NxDI would warn of unknown ones."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(DEFAULTS | settings)
        for name in ("ctx_batch_size", "tkg_batch_size", "max_batch_size"):
            self.__dict__.setdefault(name, self.batch_size)
        self.__dict__.setdefault("max_context_length", self.seq_len)
        longest = max(self.context_encoding_buckets or [0])
        if longest > self.max_context_length:
            raise AssertionError(f"Context bucket {longest} should be <= {self.max_context_length}")

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; the method exists so that mypy accepts any attribute."""
        raise AttributeError(name)


class FusedSpecNeuronConfig:
    """Configuration and checkpoint path of the draft model in a fused pair (draft and target in one graph).

    As in NxDI, `worker_cls` must not be None; the double does not use it otherwise.
    """

    def __init__(self, worker_cls: Any, draft_config: InferenceConfig, draft_model_path: str) -> None:
        if worker_cls is None:
            raise AttributeError("no worker class")
        self.draft_config = draft_config
        self.draft_model_path = draft_model_path


class InferenceConfig:
    """A NeuronConfig, and the fields of the checkpoint's config.json as attributes, which `load_config` must set."""

    def __init__(self, neuron_config: NeuronConfig, load_config: Callable[[InferenceConfig], None]) -> None:
        self.neuron_config = neuron_config
        self.fused_spec_config: FusedSpecNeuronConfig | None = None
        load_config(self)

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig

    def set_fields(self, fields: dict[str, Any]) -> None:
        """Make each field of a checkpoint's config.json an attribute of this object."""
        self.fields = fields
        self.__dict__.update(fields)

    def save(self, folder: str) -> None:
        """Write the whole configuration into a folder, from which `load` makes an equal object."""
        Path(folder, CONFIG_FILE).write_text(json.dumps(self._as_dict()))

    def _as_dict(self) -> dict[str, Any]:
        fields = {**self.fields, "neuron_config": self.neuron_config.__dict__}
        if (pair := self.fused_spec_config) is not None:
            draft = {"draft_model_path": pair.draft_model_path, "draft_config": pair.draft_config._as_dict()}
            fields["fused_spec_config"] = draft
        return fields

    @classmethod
    def load(cls, folder: str) -> InferenceConfig:
        """Return the configuration that `save` wrote into a folder."""
        fields = json.loads(Path(folder, CONFIG_FILE).read_text())
        pair = fields.pop("fused_spec_config", None)
        config = cls._from_fields(fields)
        if pair is not None:
            draft = cls._from_fields(pair["draft_config"])
            config.fused_spec_config = FusedSpecNeuronConfig("reloaded", draft, pair["draft_model_path"])
        return config

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> InferenceConfig:
        neuron_config = NeuronConfig(**fields.pop("neuron_config"))
        return cls(neuron_config, lambda config: config.set_fields(fields))


def load_pretrained_config(path: str) -> Callable[[InferenceConfig], None]:
    """Return a function that puts the fields of the checkpoint's config.json into an InferenceConfig."""
    return lambda config: config.set_fields(json.loads(Path(path, "config.json").read_text()))
