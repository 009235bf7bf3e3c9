"""Limits of a compiled model (slots, lengths, widths), computed from the arguments of its NeuronConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from specdec.inference.backends.architectures import num_kept_values
from specdec.inference.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Limits of a compiled model.

    Attributes:
        vocab_size: number of token ids.
        num_slots: B, the batch that its graphs are compiled for.
        length: L, positions of a slot's memory.
        width: tokens of the widest graph for what follows a prompt: K, or 1 where nothing is verified.
        reserved: positions at a slot's end that a graph may write to, and no sequence may use.
        max_prompt: tokens of the longest prompt that the prompt graph reads.
        prompt_width: tokens of the widest prompt graph, padding included; 0 where prompts are not padded.
        slot_bytes: bytes of one slot's keys and values, before sharding; in a pair, the target's.
    """

    vocab_size: int
    num_slots: int
    length: int
    width: int
    reserved: int
    max_prompt: int
    prompt_width: int
    slot_bytes: int

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence: positions of a slot, less those that only the padding of a pass is written to."""
        return self.length - self.reserved


def slot_shape(model_config: PretrainedConfig, arguments: Mapping[str, Any]) -> SlotShape:
    """Return the limits of a model, or of a fused pair, compiled with these arguments of NeuronConfig.

    Raises:
        ConfigError: a slot has no room beside what a verification pass needs.
    """
    reserved = int(arguments["medusa_speculation_length" if arguments.get("is_medusa") else "speculation_length"])
    length = _within(arguments["seq_len"], arguments.get("token_generation_buckets"))
    if length - reserved < 2:
        raise ConfigError(f"sequence_length {length} leaves no room beside a verification pass of {reserved} tokens")
    max_prompt = _within(arguments["max_context_length"], arguments.get("context_encoding_buckets"))
    return SlotShape(
        vocab_size=int(model_config.vocab_size),
        num_slots=int(arguments["batch_size"]),
        length=length,
        width=max(1, reserved),
        reserved=reserved,
        max_prompt=min(max_prompt, length - reserved),
        prompt_width=max_prompt,
        slot_bytes=_slot_bytes(model_config, length, arguments),
    )


def _within(limit: int, buckets: Sequence[int] | None) -> int:
    """Return the limit, or the largest of the buckets (lengths that graphs are compiled for) if that is smaller."""
    return min(int(limit), max(buckets)) if buckets else int(limit)


def _slot_bytes(model_config: PretrainedConfig, length: int, arguments: Mapping[str, Any]) -> int:
    quantized = arguments.get("kv_cache_quant") or arguments.get("kv_quant_config")
    num_bytes = 1 if quantized else 4 if arguments["torch_dtype"] == "float32" else 2
    return num_kept_values(model_config) * length * num_bytes
