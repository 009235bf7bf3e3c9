"""Base class of every model's class: the choice of graphs, and NxDI's silent faults."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support.nxdi_double import checks
from tests.support.nxdi_double.config import InferenceConfig
from tests.support.nxdi_double.fused import NeuronFusedSpecModel, sampled
from tests.support.nxdi_double.memory import Memory
from tests.support.nxdi_double.rooms import (
    automatic_buckets,
    fill,
    fitting_bucket,
    last_index,
    pad_prompt,
    read_rooms,
    scatter,
)


class NeuronModel:
    """Class that `_model_cls` refers to."""


class NeuronApplication:
    """NxDI's application; all instances record calls in `calls`, and folders of compilations in `compiled_in`."""

    _model_cls: ClassVar[Any] = NeuronModel
    calls: ClassVar[list[tuple[str, tuple[int, ...]]]] = []
    compiled_in: ClassVar[list[str]] = []

    def __init__(self, model_path: str, config: InferenceConfig | None = None) -> None:
        self.config = InferenceConfig.load(model_path) if config is None else config
        self.neuron_config = self.config.neuron_config
        checks.check_application(self.config)
        self.path = model_path
        self.graphs = {"context"}
        self._work_dir = os.environ.get("BASE_COMPILE_WORK_DIR", "the default")
        self._ready = False
        if self.neuron_config.enable_fused_speculation:
            self._model_cls = NeuronFusedSpecModel  # type: ignore[misc]
            self.enable_context_encoding()
            self.graphs.add("fused")
            return
        self.enable_context_encoding()
        if self.neuron_config.speculation_length > 0:
            self.graphs.add("speculation")
        else:
            self.enable_token_generation()

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return InferenceConfig

    @classmethod
    def save_quantized_state_dict(cls, path: str, config: InferenceConfig) -> None:
        checks.check_quantizing(config.neuron_config)
        Path(str(config.neuron_config.quantized_checkpoints_path)).write_bytes(b"quantized")

    def enable_context_encoding(self, **_: Any) -> None:
        """Do nothing: NxDI makes the first graph of `_model_cls` here."""

    def enable_token_generation(self) -> None:
        self.graphs.add("token")

    def compile(self, folder: str) -> None:
        if os.environ.get("BASE_COMPILE_WORK_DIR", "the default") != self._work_dir:
            raise RuntimeError("the work directory changed between construction and compilation")
        self.compiled_in.append(self._work_dir)
        checks.check_compilation(self.config)
        self.config.save(folder)
        pair = self.config.fused_spec_config
        shutil.copytree(self.path, Path(folder, "weights", "target"))
        if pair is not None:
            shutil.copytree(pair.draft_model_path, Path(folder, "weights", "draft"))
        Path(folder, "model.pt").write_text(",".join(sorted(self.graphs)))

    def load(self, folder: str) -> None:
        if set(Path(folder, "model.pt").read_text().split(",")) != self.graphs:
            raise RuntimeError("the artifact has other graphs than the class")
        self._bring_up(Path(folder, "weights", "target"), Path(folder, "weights", "draft"))

    def to_cpu(self) -> None:
        config = self.neuron_config
        if not config.on_cpu:
            raise RuntimeError("to_cpu without on_cpu")
        if config.torch_dtype == "float16":
            raise NotImplementedError("float16 is not supported for CPU inference")
        if config.speculation_length > 0:
            raise NotImplementedError("Speculation is not yet supported for CPU inference.")
        if config.tp_degree > 1:
            raise RuntimeError("Please initialize parallel processing via 'torchrun'.")
        self._bring_up(Path(self.path), None)

    def _bring_up(self, target: Path, draft: Path | None) -> None:
        config, pair = self.neuron_config, self.config.fused_spec_config
        rooms = {"num_rooms": config.max_batch_size, "length": config.seq_len}
        self._target = Memory(target, **rooms)
        if pair is not None and draft is not None:
            self._fused_model = self._model_cls(self.config)
            self._fused_model.target_model.memory = self._target
            self._fused_model.draft_model.memory = Memory(draft, **rooms)
        self._ready = True

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        attention_mask: Tensor | None = None,
        sampling_params: Tensor | None = None,
    ) -> SimpleNamespace:
        """Choose the graph as NxDI does: by position 0, then by width."""
        if not self._ready:
            raise RuntimeError("forward before load")
        self._check_call(input_ids, position_ids, seq_ids, sampling_params)
        mask = self._infer_mask(position_ids) if attention_mask is None else attention_mask
        if mask.shape[0] != input_ids.shape[0]:
            raise RuntimeError(f"mask of {mask.shape[0]} rows for {input_ids.shape[0]}")
        if position_ids.min() == 0:
            return self._context(input_ids, position_ids, mask, seq_ids.tolist(), sampling_params)
        if self.neuron_config.enable_fused_speculation:
            return self._fused(input_ids, position_ids, mask, seq_ids.tolist(), sampling_params)
        return self._generate(input_ids, position_ids, mask, seq_ids.tolist(), sampling_params)

    def _check_call(self, input_ids: Any, position_ids: Any, seq_ids: Any, sampling_params: Any) -> None:
        num_rows = input_ids.shape[0]
        if position_ids.shape != input_ids.shape or seq_ids.shape != (num_rows,):
            raise RuntimeError(f"shapes {input_ids.shape}, {position_ids.shape}, {seq_ids.shape} do not fit")
        if sampling_params is None:  # NxDI's default is sized for the full batch
            sampling_params = torch.ones(self.neuron_config.batch_size, 3)
        if sampling_params.shape != (num_rows, 3) or sampling_params.dtype != torch.float32:
            raise RuntimeError(f"sampling_params {sampling_params.shape} {sampling_params.dtype} for {num_rows} rows")
        if not set(seq_ids.tolist()) <= set(range(self.neuron_config.max_batch_size)):
            raise IndexError(f"seq_ids {seq_ids.tolist()}")

    def _infer_mask(self, position_ids: Tensor) -> Tensor:
        """Return the mask that NxDI infers, which is right for prompts and for one token per row."""
        width = position_ids.shape[1] if position_ids.shape[1] != 1 else int(position_ids.max())
        compared = position_ids if position_ids.shape[1] != 1 else position_ids.expand(-1, width) - 1
        return (compared >= torch.arange(width)).long()

    # The graph of prompts.

    def _context(
        self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, seq_ids: list[int], sampling_params: Tensor | None
    ) -> SimpleNamespace:
        self.calls.append(("context", tuple(input_ids.shape)))
        config, (num_rows, width) = self.neuron_config, input_ids.shape
        if num_rows != config.ctx_batch_size:
            raise RuntimeError(f"{num_rows} prompts for a context graph of {config.ctx_batch_size}")
        lengths = mask.sum(1, keepdim=True)
        if mask.shape != input_ids.shape or not torch.equal(mask, (torch.arange(width) < lengths).to(mask.dtype)):
            raise RuntimeError("the mask of a prompt is not ones and then zeros")
        bucket = fitting_bucket(self._context_buckets(), width)
        checks.check_on_cpu(config, bucket, self._context_buckets())
        input_ids, mask, position_ids = pad_prompt(input_ids, mask, position_ids, bucket)
        if config.enable_fused_speculation:
            if bucket == config.speculation_length:
                raise RuntimeError(f"a prompt of {bucket} tokens was taken for a verification")
            return self._run_fused(input_ids, mask, position_ids, seq_ids, sampling_params)
        logits, new = self._target.run(input_ids, position_ids, torch.zeros(num_rows, 0), seq_ids)
        fill(self._target, new, seq_ids[0], int(lengths))
        if bucket == config.speculation_length:  # the graph takes it for a verification
            return self._output(torch.full_like(logits, 7.0), sampling_params)
        index = last_index(position_ids)[..., None]
        return self._output(logits.gather(1, index.expand(-1, 1, logits.shape[2])), sampling_params)

    def _context_buckets(self) -> list[int]:
        config = self.neuron_config
        if not config.enable_bucketing:
            return [config.max_context_length]
        return config.context_encoding_buckets or automatic_buckets(config.max_context_length)

    def _check_room(self, mask: Tensor) -> None:
        """Raise unless a bucket has room for the held tokens, and for the K tokens of a verifying graph."""
        config = self.neuron_config
        buckets = config.token_generation_buckets or automatic_buckets(config.seq_len)
        fitting_bucket(buckets if config.enable_bucketing else [config.seq_len], mask.shape[1])

    # Graphs after a prompt.

    def _generate(
        self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, seq_ids: list[int], sampling_params: Tensor | None
    ) -> SimpleNamespace:
        width = input_ids.shape[1]
        graph = "speculation" if width == self.neuron_config.speculation_length else "token"
        if graph not in self.graphs or (graph == "token" and width != 1):
            raise AttributeError(f"no graph for {width} tokens: there are {sorted(self.graphs)}")
        self.calls.append((graph, tuple(input_ids.shape)))
        reserved = torch.zeros(len(seq_ids), width if graph == "speculation" else 0)
        self._check_room(torch.cat([mask, reserved], 1))
        logits, new = self._target.run(input_ids, position_ids, mask, read_rooms(self.neuron_config, seq_ids))
        scatter(self.neuron_config, self._target, new, position_ids, seq_ids)
        return self._output(logits, sampling_params)

    def _output(self, logits: Tensor, sampling_params: Tensor | None) -> SimpleNamespace:
        sampling = self.neuron_config.on_device_sampling_config
        if sampling is None:
            return SimpleNamespace(logits=checks.quantized_logits(self.neuron_config, logits), tokens=None)
        if not sampling.do_sample:
            return SimpleNamespace(logits=None, tokens=logits.argmax(-1).int())
        assert sampling_params is not None
        params = sampling_params if sampling.dynamic else torch.ones_like(sampling_params)
        return SimpleNamespace(logits=None, tokens=sampled(logits, params)[:, -1].int())  # of the last position alone

    # Fused speculation.

    def _fused(
        self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, seq_ids: list[int], sampling_params: Tensor | None
    ) -> SimpleNamespace:
        config = self.neuron_config
        if input_ids.shape[1] != 1:
            raise RuntimeError(f"a fused step takes one token per row, not {input_ids.shape[1]}")
        if config.on_device_sampling_config.do_sample and not config.enable_eagle_speculation:
            raise IndexError("do_sample without EAGLE")
        self.calls.append(("fused", tuple(input_ids.shape)))
        self._check_room(torch.zeros(1, mask.shape[1] + config.speculation_length))
        whole = torch.zeros(input_ids.shape[0], config.seq_len, dtype=torch.long)
        whole[:, : mask.shape[1]] = mask
        return self._run_fused(input_ids, whole, position_ids, seq_ids, sampling_params)

    def _run_fused(self, *args: Any) -> SimpleNamespace:
        return SimpleNamespace(fused_outputs=self._fused_model.split(self._fused_model(*args)))
