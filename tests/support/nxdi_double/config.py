"""NxDI's configurations, NeuronConfig and the classes around it, with the keywords that the double understands."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG_FILE = "neuron_config.json"


class OnDeviceSamplingConfig:
    def __init__(self, **kwargs: Any) -> None:
        self.do_sample = kwargs.pop("do_sample", False)
        self.top_k = kwargs.pop("top_k", 1)
        self.dynamic = kwargs.pop("dynamic", False)
        self.global_topk = kwargs.pop("global_topk", 256)


class NeuronConfig:
    """Settings of a compilation; a warning is all that an unknown name causes, as in NxDI."""

    def __init__(self, **kwargs: Any) -> None:
        self.batch_size = kwargs.pop("batch_size", 1)
        self.ctx_batch_size = kwargs.pop("ctx_batch_size", self.batch_size)
        self.tkg_batch_size = kwargs.pop("tkg_batch_size", self.batch_size)
        self.max_batch_size = kwargs.pop("max_batch_size", self.batch_size)
        self.spec_batch_size = kwargs.pop("spec_batch_size", self.batch_size)
        self.is_continuous_batching = kwargs.pop("is_continuous_batching", False)
        self.apply_seq_ids_mask = kwargs.pop("apply_seq_ids_mask", False)
        self.padding_side = kwargs.pop("padding_side", "right")
        self.seq_len = kwargs.pop("seq_len", 128)
        self.max_context_length = kwargs.pop("max_context_length", self.seq_len)
        self.tp_degree = kwargs.pop("tp_degree", 1)
        self.torch_dtype = kwargs.pop("torch_dtype", "bfloat16")
        self.cast_type = kwargs.pop("cast_type", "config")
        self.on_cpu = kwargs.pop("on_cpu", False)
        self.async_mode = kwargs.pop("async_mode", False)
        self.enable_bucketing = kwargs.pop("enable_bucketing", False)
        self.context_encoding_buckets = kwargs.pop("context_encoding_buckets", None)
        self.token_generation_buckets = kwargs.pop("token_generation_buckets", None)
        self.save_sharded_checkpoint = kwargs.pop("save_sharded_checkpoint", False)
        self.speculation_length = kwargs.pop("speculation_length", 0)
        self.enable_fused_speculation = kwargs.pop("enable_fused_speculation", False)
        self.enable_eagle_speculation = kwargs.pop("enable_eagle_speculation", False)
        self.is_eagle3 = kwargs.pop("is_eagle3", False)
        self.is_eagle_draft = kwargs.pop("is_eagle_draft", False)
        self.is_medusa = kwargs.pop("is_medusa", False)
        self.sequence_parallel_enabled = kwargs.pop("sequence_parallel_enabled", False)
        self.logical_nc_config = kwargs.pop("logical_nc_config", 1)
        self.kv_cache_quant = kwargs.pop("kv_cache_quant", False)
        self.kv_quant_config = kwargs.pop("kv_quant_config", None)
        self.quantized = kwargs.pop("quantized", False)
        self.quantized_checkpoints_path = kwargs.pop("quantized_checkpoints_path", None)
        self.quantization_dtype = kwargs.pop("quantization_dtype", "int8")
        self.quantization_type = kwargs.pop("quantization_type", "per_tensor_symmetric")
        self.modules_to_not_convert = kwargs.pop("modules_to_not_convert", None)
        self.draft_model_modules_to_not_convert = kwargs.pop("draft_model_modules_to_not_convert", None)
        self.enable_eagle_draft_input_norm = kwargs.pop("enable_eagle_draft_input_norm", False)
        self.token_tree_config = kwargs.pop("token_tree_config", None)
        self.cc_pipeline_tiling_factor = kwargs.pop("cc_pipeline_tiling_factor", 2)
        self.fused_qkv = kwargs.pop("fused_qkv", False)
        self.output_logits = kwargs.pop("output_logits", False)
        sampling = kwargs.pop("on_device_sampling_config", None)
        self.on_device_sampling_config = OnDeviceSamplingConfig(**sampling) if type(sampling) is dict else sampling
        if self.enable_eagle_speculation:
            self.enable_fused_speculation = True
        if kwargs:
            logging.warning(f"NeuronConfig init: Unexpected keyword arguments: {kwargs}")

        buckets = self.context_encoding_buckets
        if buckets is not None and sorted(buckets)[-1] > self.max_context_length:
            raise AssertionError(f"Context bucket {sorted(buckets)[-1]} should be <= {self.max_context_length}")
        if self.torch_dtype not in ("float32", "float16", "bfloat16"):
            raise AssertionError(f"Unsupported dtype: {self.torch_dtype}")

    def to_dict(self) -> dict[str, Any]:
        fields = copy.deepcopy(self.__dict__)
        if self.on_device_sampling_config is not None:
            fields["on_device_sampling_config"] = dict(self.on_device_sampling_config.__dict__)
        return fields


class FusedSpecNeuronConfig:
    def __init__(self, worker_cls: Any, draft_config: InferenceConfig, draft_model_path: str) -> None:
        if worker_cls is None:
            raise AttributeError("no worker class")
        self.worker_cls = worker_cls
        self.draft_config = draft_config
        self.draft_model_path = draft_model_path


class InferenceConfig:
    def __init__(self, neuron_config: NeuronConfig, load_config: Callable[[InferenceConfig], None]) -> None:
        self.neuron_config = neuron_config
        self.fused_spec_config: FusedSpecNeuronConfig | None = None
        load_config(self)

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig

    def save(self, folder: str) -> None:
        """Write everything from which `load` builds an equal configuration."""
        pair = self.fused_spec_config
        fields = {
            **self.fields,
            "neuron_config": self.neuron_config.to_dict(),
        }
        if pair is not None:
            draft = {**pair.draft_config.fields, "neuron_config": pair.draft_config.neuron_config.to_dict()}
            fields["fused_spec_config"] = {"draft_model_path": pair.draft_model_path, "draft_config": draft}
        Path(folder, CONFIG_FILE).write_text(json.dumps(fields))

    @classmethod
    def load(cls, folder: str) -> InferenceConfig:
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

    def set_fields(self, fields: dict[str, Any]) -> None:
        """Set the fields of config.json as attributes."""
        self.fields = fields
        self.__dict__.update(fields)


def load_pretrained_config(path: str) -> Callable[[InferenceConfig], None]:
    def load(config: InferenceConfig) -> None:
        config.set_fields(json.loads(Path(path, "config.json").read_text()))

    return load
