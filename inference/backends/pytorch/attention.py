"""Attention of one pass: every span's queries against the keys and values of its slot.

Owns the function that Transformers calls in place of its own attention, and what that function needs to know about a
pass. Not every family hands extra keyword arguments down to its attention (GPT-2 in 4.57 does not), so each attention
module carries a `PassHolder` with the running pass. Knows nothing of tokens or logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from inference.backends.pytorch.slot_cache import LayerShape, SlotCache
from inference.errors import UnsupportedModelError
from inference.model.slots import Span

ATTENTION_NAME = "specdec_slots"

# Folding heads into queries repeats the mask, so it is for the widths of decoding and verification, not of prompts.
MAX_FOLDED_TOKENS = 32

# What a layer may ask of its attention function that plain causal attention does not do; None asks for nothing.
UNSUPPORTED_OPTIONS = {
    "attention_mask": "a mask of its own",
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position bias",
}

Options: TypeAlias = dict[str, Any]
"""Further arguments of a layer's attention function, beside queries, keys, values and scaling."""


class LayerAttention(Protocol):
    """One pass, seen from an attention layer."""

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, options: Options
    ) -> Tensor:
        """Attend to all positions up to each token's own.

        Args:
            module: layer with index `layer_idx`.
            query: [1, num_heads, num_tokens, dim]
            key, value: [1, num_kv_heads, num_tokens, dim]
            scaling: factor of the scores; None is one over the square root of dim.
            options: what else the layer asked for; only a `ShapeRecorder` looks.

        Returns:
            [1, num_tokens, num_heads, dim]
        """


class PassHolder:
    """Holder of the running pass, shared by all attention modules of one model."""

    __slots__ = ("current",)

    current: LayerAttention


def attach(model: PreTrainedModel, holder: PassHolder) -> None:
    """Make the model attend through `holder`."""
    model.set_attn_implementation(ATTENTION_NAME)
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.pass_holder = holder


def slot_attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Stand in for Transformers' attention; its signature and its result [1, num_tokens, num_heads, dim] are theirs."""
    holder: PassHolder = module.pass_holder  # type: ignore[assignment]
    options["attention_mask"] = attention_mask
    return holder.current.attend(module, query, key, value, scaling=scaling, options=options), None


# A name without a mask function of its own makes Transformers build no mask at all.
AttentionInterface.register(ATTENTION_NAME, slot_attention)


class SpanAttention:
    """One span of a pass: where its tokens stand, and the masks that its queries need."""

    __slots__ = ("_folded", "_mask", "end", "num_tokens", "slot", "start")

    def __init__(self, span: Span, *, dtype: torch.dtype, device: torch.device) -> None:
        self.slot = span.slot
        self.start = span.start
        self.num_tokens = len(span.token_ids)
        self.end = span.start + self.num_tokens
        self._mask: Tensor | None = None  # [num_tokens, end], added to the scores
        self._folded: dict[int, Tensor] = {}  # group size -> [group_size * num_tokens, end]
        # A single query sees everything, and from position 0 on the mask is the plain triangle: both need no tensor.
        if self.num_tokens > 1 and self.start > 0:
            self._mask = torch.full((self.num_tokens, self.end), -torch.inf, dtype=dtype, device=device)
            self._mask.triu_(self.start + 1)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """Attend from query [1, num_heads, num_tokens, dim] to keys and values [1, num_kv_heads, end, dim]."""
        num_heads, num_kv_heads = query.shape[1], keys.shape[1]
        is_causal = self._mask is None and self.num_tokens > 1
        if num_heads == num_kv_heads or is_causal or self.num_tokens > MAX_FOLDED_TOKENS:
            return scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=self._mask,
                is_causal=is_causal,
                scale=scaling,
                enable_gqa=num_heads != num_kv_heads,
            )
        # Heads that share keys become further queries of one head, so that the keys are read once.
        group_size = num_heads // num_kv_heads
        folded = query.reshape(1, num_kv_heads, group_size * self.num_tokens, query.shape[3])
        mask = self._folded_mask(group_size)
        attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        return attended.reshape(1, num_heads, self.num_tokens, values.shape[3])

    def _folded_mask(self, group_size: int) -> Tensor | None:
        if self._mask is None:
            return None
        if group_size not in self._folded:  # all layers share it
            self._folded[group_size] = self._mask.repeat(group_size, 1)
        return self._folded[group_size]


class SlotPass:
    """A pass over spans: writes each span's keys and values to its slot, then attends to all of the slot so far."""

    def __init__(self, cache: SlotCache, spans: Sequence[Span], *, dtype: torch.dtype, device: torch.device) -> None:
        self._cache = cache
        self._spans = [SpanAttention(span, dtype=dtype, device=device) for span in spans]
        self._widths = [span.num_tokens for span in self._spans]

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, options: Options
    ) -> Tensor:
        layer = _layer_index(module)
        if len(self._spans) == 1:
            return self._attend_span(layer, self._spans[0], query, key, value, scaling)
        pieces = zip(
            self._spans,
            torch.split(query, self._widths, dim=2),
            torch.split(key, self._widths, dim=2),
            torch.split(value, self._widths, dim=2),
            strict=True,
        )
        return torch.cat([self._attend_span(layer, span, q, k, v, scaling) for span, q, k, v in pieces], dim=1)

    def _attend_span(
        self, layer: int, span: SpanAttention, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        keys, values = self._cache.write(layer, span.slot, span.start, key, value)
        return span.attend(query, keys, values, scaling).transpose(1, 2)  # [1, num_tokens, num_heads, dim]


class ShapeRecorder:
    """A pass of one token that notes what each layer would store, and refuses layers that ask for more.

    Asking the layers beats reading configurations, whose names differ by family.
    """

    def __init__(self, architecture: str, max_length: int) -> None:
        self._architecture = architecture
        self._max_length = max_length
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, options: Options
    ) -> Tensor:
        self._require_supported(module, options)
        self.shapes[_layer_index(module)] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        attended = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # one token sees only itself
        return attended.transpose(1, 2)

    def _require_supported(self, module: Module, options: dict[str, Any]) -> None:
        refused = [meaning for name, meaning in UNSUPPORTED_OPTIONS.items() if options.get(name) is not None]
        window = options.get("sliding_window")
        if window is not None and window < self._max_length:
            refused.append(f"a sliding window of {window}, below the sequence length of {self._max_length}")
        if getattr(module, "is_causal", True) is False:
            refused.append("attention to later tokens")
        if _layer_index(module) in self.shapes:
            refused.append("attention more than once")
        if refused:
            raise UnsupportedModelError(
                f"{self._architecture} is not supported: its layer {_layer_index(module)} asks for {', '.join(refused)}"
            )


def _layer_index(module: Module) -> int:
    return module.layer_idx  # type: ignore[return-value]
