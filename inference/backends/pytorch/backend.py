"""The torch backend: any causal language model of Transformers, over slots and positions.

Owns the forward pass and the loading of a checkpoint. The tokens of all spans run as one row without padding; what
belongs together is the attention's business (`inference.backends.pytorch.attention`). Knows nothing of tokenizers,
sampling or speculation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from inference.backends.architectures import (
    architecture_name,
    forward_arguments,
    layer_windows,
    require_supported_config,
    require_supported_model,
    resolve_length,
)
from inference.backends.checkpoint import load_config, load_weights
from inference.backends.pytorch.attention import LayerAttention, PassHolder, ShapeRecorder, SlotPass, attach
from inference.backends.pytorch.packed_linear import pack_linears
from inference.backends.pytorch.slot_cache import LayerShape, SlotCache
from inference.backends.pytorch.static_pass import StaticPasses
from inference.backends.spans import check_spans, wanted_rows
from inference.config import ModelConfig
from inference.errors import ConfigError, UnsupportedModelError
from inference.model.slots import Array, Span

logger = logging.getLogger(__name__)

NUM_TEST_TOKENS = 4
"""Tokens that linear layers are compared over before and after they are packed."""


class TorchBackend:
    """A causal language model and its slots. Takes the model over: its attention reads from the slots afterwards.

    Args:
        fixed_shapes: run passes that are not prompts in fixed shapes, captured as CUDA graphs; None is "on CUDA".

    Raises:
        UnsupportedModelError: slots of keys and values cannot carry this architecture.
    """

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_length: int, fixed_shapes: bool | None = None
    ) -> None:
        require_supported_config(model.config, max_length, windows=True)
        require_supported_model(model)
        self._model = model.eval()
        # Transformers 4 counts positions from an empty cache unless they are passed by this name too.
        self._takes_cache_position = "cache_position" in forward_arguments(model)
        self._holder = PassHolder()
        attach(self._model, self._holder)
        self._dtype = model.dtype
        self._device = model.device
        self.vocab_size, shapes = self._probe(max_length)
        self.num_slots, self.max_length = num_slots, max_length
        self.arithmetic = f"torch {self._dtype} {self._device.type}"
        kind = {"dtype": self._dtype, "device": self._device}
        is_static = self._device.type == "cuda" if fixed_shapes is None else fixed_shapes
        self._cache = SlotCache(shapes, num_slots=num_slots, max_length=max_length, num_spare=int(is_static), **kind)
        self.slot_bytes = self._cache.slot_bytes
        self._static = StaticPasses(self._run, self._cache) if is_static else None
        if self._device.type == "cpu" and self._dtype == torch.float32:
            self._pack_linears(SlotCache(shapes, num_slots=1, max_length=NUM_TEST_TOKENS, **kind))

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Array:
        """See `inference.model.slots.Backend`. A numpy array on CPU, a torch tensor elsewhere."""
        check_spans(spans, self)
        logits = self._forward_static(spans)
        if logits is None:
            logits = self._forward_eager(spans)
        return logits.numpy() if self._device.type == "cpu" else logits

    def _forward_static(self, spans: Sequence[Span]) -> torch.Tensor | None:
        """A pass in a fixed shape, or None where that cannot be."""
        if self._static is None:
            return None
        try:
            return self._static.forward(spans)
        except torch.OutOfMemoryError:  # is no fault of the shape: the engine makes the pass smaller
            raise
        except RuntimeError as error:  # such as a layer that asks the device for sizes, which no graph can hold
            logger.warning("passes are not captured as CUDA graphs: %s", error)
            self._static = None
            return None

    def _forward_eager(self, spans: Sequence[Span]) -> torch.Tensor:
        token_ids = [token_id for span in spans for token_id in span.token_ids]
        positions = [position for span in spans for position in range(span.start, span.start + len(span.token_ids))]
        inputs = torch.tensor([token_ids, positions]).to(self._device, non_blocking=True)  # [2, num_tokens]
        slot_pass = SlotPass(self._cache, spans, dtype=self._dtype, device=self._device)
        rows = wanted_rows(spans)
        keep = None if len(rows) == len(token_ids) else rows
        return self._run(inputs, slot_pass, keep)  # [num_rows, vocab_size]

    @torch.inference_mode()
    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """See `inference.model.slots.ForkingBackend`."""
        self._cache.fork(source_slot, destination_slot, start, end)

    def _run(self, inputs: torch.Tensor, slot_pass: LayerAttention, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logits of some rows of the flattened tokens; None is all of them."""
        arguments: dict[str, Any] = {
            "input_ids": inputs[0:1],  # [1, num_tokens]
            "position_ids": inputs[1:2],
            "use_cache": False,
        }
        if self._takes_cache_position:
            arguments["cache_position"] = inputs[1]  # [num_tokens]
        self._holder.current = slot_pass
        if rows is not None and not rows:  # a part of a prompt: the head would be wasted
            self._model.base_model(**arguments)
            return torch.empty(0, self.vocab_size, device=self._device)
        keep = 0 if rows is None else torch.tensor(rows).to(self._device, non_blocking=True)
        logits: torch.Tensor = self._model(**arguments, logits_to_keep=keep).logits  # [1, num_rows, vocab_size]
        return logits[0].float()

    @torch.inference_mode()
    def _pack_linears(self, cache: SlotCache) -> None:
        """Make passes over several tokens cost little more than over one; `cache` is for the test of it."""
        span = Span(slot=0, start=0, token_ids=range(NUM_TEST_TOKENS), num_logits=NUM_TEST_TOKENS)
        inputs = torch.tensor([span.token_ids, span.token_ids]) % self.vocab_size  # [2, num_tokens]
        slot_pass = SlotPass(cache, [span], dtype=self._dtype, device=self._device)
        pack_linears(self._model, lambda: self._run(inputs, slot_pass))

    @torch.inference_mode()
    def _probe(self, max_length: int) -> tuple[int, list[LayerShape]]:
        """Run one token, at the last position, to learn the vocabulary's size and what each layer stores."""
        architecture = architecture_name(self._model.config)
        recorder = ShapeRecorder(architecture, layer_windows(self._model.config), max_length)
        try:
            logits = self._run(torch.tensor([[0], [max_length - 1]], device=self._device), recorder)
        except ConfigError:
            raise
        except Exception as error:  # such as a layer that indexes the mask which it is not given
            raise UnsupportedModelError(f"{architecture} is not supported: one token fails with {error!r}") from error
        shapes = [recorder.shapes[layer] for layer in sorted(recorder.shapes)]
        if len(shapes) != self._model.config.get_text_config().num_hidden_layers:
            raise UnsupportedModelError(f"{architecture} is not supported: its attention cannot be replaced")
        return logits.shape[1], shapes


def load_torch_backend(config: ModelConfig) -> TorchBackend:
    """Load a checkpoint from its directory; never from the network.

    Raises:
        ConfigError: the directory, the checkpoint or the settings cannot be used; the message names which.
    """
    model_config = load_config(config.path)
    max_length = resolve_length(model_config, config.sequence_length)
    require_supported_config(model_config, max_length, windows=True)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    device = _resolve_device(config.device)
    model = load_weights(config.path, model_config, dtype=_resolve_dtype(config.dtype, device), device=device)
    return TorchBackend(model, num_slots=config.num_slots, max_length=max_length)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name} is not a torch device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name} is neither cpu nor cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} is not among the {torch.cuda.device_count()} CUDA devices here")
    return device


def _resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype {name}: backend torch computes in floating point only; int8 is backend onnx's")
    return dtype
