"""Base class of compiled models in the double of NxDI (AWS's NxD Inference); it chooses graphs as NxDI does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support.nxdi_double.config import InferenceConfig
from tests.support.nxdi_double.fused import NeuronFusedSpecModel
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
    """Stand-in for the model class that an application of NxDI names in its attribute `_model_cls`."""


class NeuronApplication:
    """The double of NxDI's application, a model with its compiled graphs.

    All instances share two lists: `calls`, graph and shape of input_ids of each call, and `compiled_in`, the work
    directory of each compilation.
    """

    _model_cls: ClassVar[Any] = NeuronModel
    calls: ClassVar[list[tuple[str, tuple[int, ...]]]] = []
    compiled_in: ClassVar[list[str]] = []

    def __init__(self, model_path: str, config: InferenceConfig | None = None) -> None:
        self.config = InferenceConfig.load(model_path) if config is None else config
        self.neuron_config = self.config.neuron_config
        self._check()
        self.path = model_path
        self.graphs = {"context"}
        self._work_dir = os.environ.get("BASE_COMPILE_WORK_DIR", "the default")
        if self.neuron_config.enable_fused_speculation:
            self._model_cls = NeuronFusedSpecModel  # type: ignore[misc]
            self.graphs.add("fused")
        elif self.neuron_config.speculation_length > 0:
            self.graphs.add("speculation")
        else:
            self.enable_token_generation()
        self.enable_context_encoding()

    def _check(self) -> None:
        """Raise ValueError for settings for which NxDI raises when an application is created."""
        neuron, pair = self.neuron_config, self.config.fused_spec_config
        if neuron.enable_fused_speculation and (neuron.on_device_sampling_config is None or pair is None):
            raise ValueError("fused speculation needs on-device sampling and a draft")
        draft = 0 if pair is None else pair.draft_config.neuron_config.speculation_length
        if draft and not neuron.enable_eagle_speculation:
            raise ValueError(f"the draft verifies {draft} tokens itself")

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return InferenceConfig

    def enable_context_encoding(self, **_: Any) -> None:
        """Do nothing; in NxDI, this method makes the graph for prompts, the first one."""

    def enable_token_generation(self) -> None:
        self.graphs.add("token")

    def compile(self, folder: str) -> None:
        if os.environ.get("BASE_COMPILE_WORK_DIR", "the default") != self._work_dir:
            raise RuntimeError("the work directory changed between construction and compilation")
        self.compiled_in.append(self._work_dir)
        self.config.save(folder)
        shutil.copytree(self.path, Path(folder, "weights", "target"))
        if (pair := self.config.fused_spec_config) is not None:
            shutil.copytree(pair.draft_model_path, Path(folder, "weights", "draft"))
        Path(folder, "model.pt").write_text(",".join(sorted(self.graphs)))

    def load(self, folder: str) -> None:
        if set(Path(folder, "model.pt").read_text().split(",")) != self.graphs:
            raise RuntimeError("the artifact has other graphs than the class")
        rooms = {"num_rooms": self.neuron_config.max_batch_size, "length": self.neuron_config.seq_len}
        self._target = Memory(Path(folder, "weights", "target"), **rooms)
        if self.config.fused_spec_config is not None:
            self._fused_model = self._model_cls(self.config)
            self._fused_model.target_model.memory = self._target
            self._fused_model.draft_model.memory = Memory(Path(folder, "weights", "draft"), **rooms)

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        attention_mask: Tensor | None,
        sampling_params: Tensor,
    ) -> SimpleNamespace:
        """Run the graph that NxDI would choose: that for prompts if any position is 0.

        Otherwise it is the fused graph if there is one, else that for this number of tokens per row.
        """
        self._check_call(input_ids, position_ids, seq_ids, sampling_params)
        mask = attention_mask
        if mask is None:
            mask = (torch.arange(int(position_ids.max())) < position_ids).long()
        if mask.shape[0] != input_ids.shape[0]:
            raise RuntimeError(f"mask of {mask.shape[0]} rows for {input_ids.shape[0]}")
        if position_ids.min() == 0:
            return self._context(input_ids, position_ids, mask, seq_ids.tolist())
        if self.neuron_config.enable_fused_speculation:
            return self._fused(input_ids, position_ids, mask, seq_ids.tolist())
        return self._generate(input_ids, position_ids, mask, seq_ids.tolist())

    def _check_call(self, input_ids: Any, position_ids: Any, seq_ids: Any, sampling_params: Any) -> None:
        num_rows = input_ids.shape[0]
        if position_ids.shape != input_ids.shape or seq_ids.shape != (num_rows,):
            raise RuntimeError(f"shapes {input_ids.shape}, {position_ids.shape}, {seq_ids.shape} do not fit")
        if sampling_params.shape != (num_rows, 3) or sampling_params.dtype != torch.float32:
            raise RuntimeError(f"sampling_params {sampling_params.shape} {sampling_params.dtype} for {num_rows} rows")
        if not set(seq_ids.tolist()) <= set(range(self.neuron_config.max_batch_size)):
            raise IndexError(f"seq_ids {seq_ids.tolist()}")

    # The graph of prompts.

    def _context(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, seq_ids: list[int]) -> SimpleNamespace:
        self.calls.append(("context", tuple(input_ids.shape)))
        config, (num_rows, width) = self.neuron_config, input_ids.shape
        if num_rows != config.ctx_batch_size:
            raise RuntimeError(f"{num_rows} prompts for a context graph of {config.ctx_batch_size}")
        lengths = mask.sum(1, keepdim=True)
        if mask.shape != input_ids.shape or not torch.equal(mask, (torch.arange(width) < lengths).to(mask.dtype)):
            raise RuntimeError("the mask of a prompt is not ones and then zeros")
        bucket = fitting_bucket(self._context_buckets(), width)
        input_ids, mask, position_ids = pad_prompt(input_ids, mask, position_ids, bucket)
        if config.enable_fused_speculation:
            if bucket == config.speculation_length:
                raise RuntimeError(f"a prompt of {bucket} tokens was taken for a verification")
            return self._run_fused(input_ids, mask, position_ids, seq_ids)
        logits, new = self._target.run(input_ids, position_ids, torch.zeros(num_rows, 0), seq_ids)
        fill(self._target, new, seq_ids[0], int(lengths))
        if bucket == config.speculation_length:  # the graph takes it for a verification
            return self._output(torch.full_like(logits, 7.0))
        index = last_index(position_ids)[..., None]
        return self._output(logits.gather(1, index.expand(-1, 1, logits.shape[2])))

    def _context_buckets(self) -> list[int]:
        config = self.neuron_config
        if not config.enable_bucketing:
            return [config.max_context_length]
        return config.context_encoding_buckets or automatic_buckets(config.max_context_length)

    def _check_room(self, num_positions: int) -> None:
        """Raise ValueError if this number of positions exceeds every bucket (length for which a graph was compiled)."""
        config = self.neuron_config
        buckets = config.token_generation_buckets or automatic_buckets(config.seq_len)
        fitting_bucket(buckets if config.enable_bucketing else [config.seq_len], num_positions)

    # Graphs after a prompt.

    def _generate(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, seq_ids: list[int]) -> SimpleNamespace:
        width = input_ids.shape[1]
        graph = "speculation" if width == self.neuron_config.speculation_length else "token"
        if graph not in self.graphs or (graph == "token" and width != 1):
            raise AttributeError(f"no graph for {width} tokens: there are {sorted(self.graphs)}")
        self.calls.append((graph, tuple(input_ids.shape)))
        self._check_room(mask.shape[1] + (width if graph == "speculation" else 0))
        logits, new = self._target.run(input_ids, position_ids, mask, read_rooms(self.neuron_config, seq_ids))
        scatter(self.neuron_config, self._target, new, position_ids, seq_ids)
        return self._output(logits)

    def _output(self, logits: Tensor) -> SimpleNamespace:
        if self.neuron_config.on_device_sampling_config is None:
            return SimpleNamespace(logits=logits, tokens=None)
        return SimpleNamespace(logits=None, tokens=logits[:, -1].argmax(-1).int())

    # Fused speculation.

    def _fused(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, seq_ids: list[int]) -> SimpleNamespace:
        config = self.neuron_config
        if input_ids.shape[1] != 1:
            raise RuntimeError(f"a fused step takes one token per row, not {input_ids.shape[1]}")
        self.calls.append(("fused", tuple(input_ids.shape)))
        self._check_room(mask.shape[1] + config.speculation_length)
        whole = torch.zeros(input_ids.shape[0], config.seq_len, dtype=torch.long)
        whole[:, : mask.shape[1]] = mask
        return self._run_fused(input_ids, whole, position_ids, seq_ids)

    def _run_fused(self, *args: Any) -> SimpleNamespace:
        return SimpleNamespace(fused_outputs=self._fused_model.split(self._fused_model(*args)))
