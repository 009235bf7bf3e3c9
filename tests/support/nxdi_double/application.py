"""NeuronLlamaForCausalLM and NeuronQwen3ForCausalLM: routing, graphs and their silent faults."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.support.nxdi_double.config import InferenceConfig
from tests.support.nxdi_double.medusa import Heads, best_ids, run_tree
from tests.support.nxdi_double.memory import Memory

PADDING = -1


class NeuronModel:
    """What `_model_cls` names."""


class NeuronApplication:
    """Counts what tests want to know in `calls` and `compiled_in`, over all instances."""

    _model_cls: ClassVar[Any] = NeuronModel
    calls: ClassVar[list[tuple[str, tuple[int, ...]]]] = []
    compiled_in: ClassVar[list[str]] = []

    def __init__(self, model_path: str, config: InferenceConfig | None = None) -> None:
        self.config = InferenceConfig.load(model_path) if config is None else config
        self.neuron_config = self.config.neuron_config
        self._check()
        self.graphs = {"context"}
        self._work_dir = os.environ.get("BASE_COMPILE_WORK_DIR", "the default")
        self._ready = False
        if self.neuron_config.enable_fused_speculation:
            type(self)._model_cls = "NeuronFusedSpecModel"  # as NxDI does, to the class that it is built from
            self.graphs.add("fused")
        elif self.neuron_config.speculation_length > 0:
            self.graphs.add("speculation")
        elif self.neuron_config.medusa_speculation_length > 0:
            self.graphs.add("medusa")
        else:
            self.enable_token_generation()

    def _check(self) -> None:
        config = self.neuron_config
        pair = self.config.fused_spec_config
        if config.enable_fused_speculation and config.on_device_sampling_config is None:
            raise ValueError("fused speculation needs on-device sampling")
        if config.enable_fused_speculation and (pair is None or pair.worker_cls == "NeuronFusedSpecModel"):
            raise ValueError("no fused_spec_config, or its worker class is the fused model itself")
        if config.is_medusa and config.on_device_sampling_config is None:
            raise AssertionError("Medusa speculation must use on-device sampling")
        if config.is_eagle3 and not config.sequence_parallel_enabled:
            raise RuntimeError("EAGLE3 fails without sequence parallel")
        if pair is not None:
            self._check_draft(pair.draft_config.neuron_config)

    def _check_draft(self, draft: Any) -> None:
        config = self.neuron_config
        if draft.enable_fused_speculation or draft.speculation_length != (
            config.speculation_length if config.enable_eagle_speculation else 0
        ):
            raise ValueError("the draft's configuration is not a draft's")
        if draft.is_eagle_draft != config.enable_eagle_speculation or config.tp_degree % draft.tp_degree:
            raise ValueError("the draft does not fit the method or the cores")

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return InferenceConfig

    @classmethod
    def save_quantized_state_dict(cls, path: str, config: InferenceConfig) -> None:
        Path(str(config.neuron_config.quantized_checkpoints_path)).write_bytes(b"quantized")

    def enable_token_generation(self) -> None:
        self.graphs.add("token")

    def compile(self, folder: str) -> None:
        if os.environ.get("BASE_COMPILE_WORK_DIR", "the default") != self._work_dir:
            raise RuntimeError("the work directory changed between construction and compilation")
        self.compiled_in.append(self._work_dir)
        self.config.save(folder)
        Path(folder, "model.pt").write_text(",".join(sorted(self.graphs)))

    def load(self, folder: str) -> None:
        if set(Path(folder, "model.pt").read_text().split(",")) != self.graphs:
            raise RuntimeError("the artifact has other graphs than the class")
        self._bring_up()

    def to_cpu(self) -> None:
        config = self.neuron_config
        if not config.on_cpu:
            raise RuntimeError("to_cpu without on_cpu")
        if config.torch_dtype == "float16" or config.speculation_length > 0:
            raise NotImplementedError("Speculation and float16 are not yet supported for CPU inference.")
        if config.tp_degree > 1:
            raise RuntimeError("Please initialize parallel processing via 'torchrun'.")
        self._bring_up()

    def _bring_up(self) -> None:
        config = self.neuron_config
        rooms = {"num_rooms": config.max_batch_size, "length": config.seq_len}
        self._target = Memory(self.config.checkpoint, **rooms)  # type: ignore[attr-defined]
        pair = self.config.fused_spec_config
        self._draft = None if pair is None else Memory(pair.draft_model_path, **rooms)
        if config.is_medusa:
            self._heads = Heads(self.config.checkpoint, config.num_medusa_heads)  # type: ignore[attr-defined]
        self._ready = True

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        sampling_params: torch.Tensor | None = None,
        medusa_args: Any = None,
    ) -> SimpleNamespace:
        """Route by position 0, then by width, as NxDI does."""
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
        if self.neuron_config.is_medusa:
            return self._tree(input_ids, position_ids, mask, medusa_args)
        return self._generate(input_ids, position_ids, mask, seq_ids.tolist())

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

    def _infer_mask(self, position_ids: torch.Tensor) -> torch.Tensor:
        """NxDI's guess; right for prompts and for one token per row."""
        width = position_ids.shape[1] if position_ids.shape[1] != 1 else int(position_ids.max())
        compared = position_ids if position_ids.shape[1] != 1 else position_ids.expand(-1, width) - 1
        return (compared >= torch.arange(width)).long()

    # The graph of prompts.

    def _context(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        seq_ids: list[int],
        sampling_params: torch.Tensor | None,
    ) -> SimpleNamespace:
        self.calls.append(("context", tuple(input_ids.shape)))
        config, (num_rows, width) = self.neuron_config, input_ids.shape
        if num_rows != config.ctx_batch_size:
            raise RuntimeError(f"{num_rows} prompts for a context graph of {config.ctx_batch_size}")
        if width > config.max_context_length:
            raise RuntimeError(f"a prompt of {width} tokens, the context graph has {config.max_context_length}")
        if not torch.equal(mask, torch.ones_like(mask)) or mask.shape[1] != width:
            raise RuntimeError("the mask of a prompt is not all ones")
        largest = max(self._context_buckets())  # the only one that is filled to its end
        bucket = min((bucket for bucket in self._context_buckets() if bucket > width), default=largest)
        nothing = torch.zeros(num_rows, 0)
        logits, new = self._target.run(input_ids, position_ids, nothing, seq_ids)
        self._fill(self._target, new, seq_ids[0], width, bucket)
        last = logits.gather(1, position_ids.argmax(1)[:, None, None].expand(-1, 1, logits.shape[2]))
        if self._draft is not None:
            _, drafted = self._draft.run(input_ids, position_ids, nothing, seq_ids)
            self._fill(self._draft, drafted, seq_ids[0], width, bucket)
            return self._first_token(self._choose(last, sampling_params), width)
        if config.is_medusa:
            hidden = self._target.hidden.gather(
                1, position_ids.argmax(1)[:, None, None].expand(-1, 1, self._target.hidden.shape[2])
            )
            return best_ids(last[:, -1], hidden[:, -1], self._heads, config)
        if bucket == config.speculation_length:  # the graph takes it for a verification
            return SimpleNamespace(logits=torch.zeros(num_rows, bucket, logits.shape[2]))
        return self._output(last)

    def _context_buckets(self) -> list[int]:
        config = self.neuron_config
        if config.context_encoding_buckets:
            return list(config.context_encoding_buckets)
        buckets, size = [config.max_context_length], 8
        while config.enable_bucketing and size < config.max_context_length:
            buckets.append(size if size != config.speculation_length else size + 1)
            size *= 2
        return buckets

    def _fill(self, memory: Memory, new: torch.Tensor, room: int, width: int, bucket: int) -> None:
        """A prompt is written from 0 to its bucket's end, whatever its positions say."""
        memory.write(new, 0, room, torch.arange(width))
        memory.soil(room, width, bucket)

    def _tree(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, medusa_args: Any
    ) -> SimpleNamespace:
        width = self.neuron_config.medusa_speculation_length
        if input_ids.shape != (1, width):
            raise AttributeError(f"no graph for {input_ids.shape}: there are {sorted(self.graphs)}")
        self.calls.append(("medusa", tuple(input_ids.shape)))
        logits = run_tree(self._target, input_ids, position_ids, mask, medusa_args)
        return best_ids(logits, self._target.hidden, self._heads, self.neuron_config)

    # Graphs behind a prompt.

    def _generate(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, seq_ids: list[int]
    ) -> SimpleNamespace:
        width = input_ids.shape[1]
        graph = "speculation" if width == self.neuron_config.speculation_length else "token"
        if graph not in self.graphs or (graph == "token" and width != 1):
            raise AttributeError(f"no graph for {width} tokens: there are {sorted(self.graphs)}")
        self.calls.append((graph, tuple(input_ids.shape)))
        logits, new = self._target.run(input_ids, position_ids, mask, self._read_rooms(seq_ids))
        self._scatter(self._target, new, position_ids, seq_ids)
        return self._output(logits)

    def _output(self, logits: torch.Tensor) -> SimpleNamespace:
        if self.neuron_config.on_device_sampling_config is not None:
            return SimpleNamespace(logits=None, tokens=logits.argmax(-1).int())
        return SimpleNamespace(logits=logits, tokens=None)

    def _read_rooms(self, seq_ids: list[int]) -> list[int]:
        """A full batch reads room i for row i, whatever seq_ids say."""
        full = len(seq_ids) == self.neuron_config.tkg_batch_size
        return list(range(len(seq_ids))) if full else seq_ids

    def _scatter(self, memory: Memory, new: torch.Tensor, position_ids: torch.Tensor, seq_ids: list[int]) -> None:
        """Write by position. Rows that pad the batch write token 0 at position 0 of the rooms that are not named."""
        for row, room in enumerate(seq_ids):
            memory.write(new, row, room, position_ids[row])
        others = [room for room in range(self.neuron_config.tkg_batch_size) if room not in seq_ids]
        if others and not self.neuron_config.apply_seq_ids_mask:
            for room in others:
                memory.soil(room, 0, 1)

    # Fused speculation.

    def _first_token(self, token_ids: torch.Tensor, width: int) -> SimpleNamespace:
        accepted = torch.full((1, self.neuron_config.speculation_length), PADDING, dtype=torch.int32)
        accepted[:, :1] = token_ids
        next_position = torch.tensor([[width]], dtype=torch.int32)
        return SimpleNamespace(fused_outputs=[accepted, accepted[:, :1], torch.ones(1, width), next_position])

    def _fused(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        seq_ids: list[int],
        sampling_params: torch.Tensor | None,
    ) -> SimpleNamespace:
        config = self.neuron_config
        if input_ids.shape[1] != 1:
            raise RuntimeError(f"a fused step takes one token per row, not {input_ids.shape[1]}")
        sampling = config.on_device_sampling_config
        if sampling.do_sample and not config.enable_eagle_speculation:
            raise IndexError("do_sample without EAGLE")
        self.calls.append(("fused", tuple(input_ids.shape)))
        positions = position_ids + torch.arange(config.speculation_length)  # [num_rows, K]
        candidates = self._propose(input_ids, position_ids, mask, seq_ids)  # [num_rows, K]
        logits, new = self._target.run(candidates, positions, mask, self._read_rooms(seq_ids))
        self._scatter(self._target, new, positions, seq_ids)
        return self._accept(candidates, self._choose(logits, sampling_params), position_ids)

    def _propose(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, seq_ids: list[int]
    ) -> torch.Tensor:
        """K - 1 greedy tokens behind the input, and one draft step more: its last token must be in its memory too."""
        if self._draft is None:
            raise RuntimeError("no draft")
        tokens, position, rooms = [input_ids], position_ids, self._read_rooms(seq_ids)
        seen = torch.zeros(input_ids.shape[0], self.neuron_config.seq_len)
        seen[:, : mask.shape[1]] = mask
        for _ in range(self.neuron_config.speculation_length):
            logits, new = self._draft.run(tokens[-1], position, seen, rooms)
            self._scatter(self._draft, new, position, seq_ids)
            seen.scatter_(1, position, 1.0)
            tokens.append(logits[:, -1:].argmax(-1))
            position = position + 1
        return torch.cat(tokens[:-1], dim=1)

    def _choose(self, logits: torch.Tensor, sampling_params: torch.Tensor | None) -> torch.Tensor:
        """Tokens in law, by the row's own top_k and temperature: a draft token that equals one is accepted."""
        if not self.neuron_config.on_device_sampling_config.do_sample:
            return logits.argmax(-1)
        rows = []
        for row, (top_k, _, temperature) in zip(logits, sampling_params.tolist(), strict=True):  # type: ignore[union-attr]
            values, ids = row.topk(int(top_k))
            rows.append(ids.gather(1, torch.multinomial((values / temperature).softmax(-1), 1))[:, 0])
        return torch.stack(rows)

    def _accept(self, candidates: torch.Tensor, tokens: torch.Tensor, position_ids: torch.Tensor) -> SimpleNamespace:
        matches = (candidates[:, 1:] == tokens[:, :-1]).long().cumprod(1).sum(1, keepdim=True) + 1  # [num_rows, 1]
        kept = torch.arange(tokens.shape[1]) < matches
        accepted = torch.where(kept, tokens, PADDING).int()
        next_positions = (position_ids + matches).int()
        next_ids = accepted.gather(1, matches - 1)
        return SimpleNamespace(fused_outputs=[accepted, next_ids, kept, next_positions])


class NeuronLlamaForCausalLM(NeuronApplication):
    pass


class NeuronQwen3ForCausalLM(NeuronApplication):
    pass
