"""Attention of one pass: every span's queries against the keys and values of its slot.

Owns the function that Transformers calls in place of its own attention. That function has to know the running pass,
and not every family hands extra keyword arguments down to its attention (GPT-2 in Transformers 4.57 does not). So each
attention module has an attribute `pass_holder`, a `PassHolder` with the running pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from specdec.inference.backends.pytorch.slot_cache import LayerShape, SlotCache
from specdec.inference.errors import UnsupportedModelError
from specdec.inference.model.slots import Span

ATTENTION_NAME = "specdec_slots"
"""Name under which Transformers finds `slot_attention`."""

# Folding heads into queries repeats the mask, so it is for the widths of decoding and verification, not of prompts.
MAX_FOLDED_TOKENS = 32

UNSUPPORTED_OPTIONS = {
    "attention_mask": "a mask of its own",
    "position_bias": "position bias",
}
"""Arguments of a layer's attention function that are refused unless they are None, with their meaning for messages."""

Options: TypeAlias = dict[str, Any]
"""Further arguments of a layer's attention function, beside queries, keys, values and scaling."""


class LayerAttention(Protocol):
    """Attention of one pass, to which `slot_attention` hands the calls of all layers."""

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, options: Options
    ) -> Tensor:
        """Attend from each token to all positions up to its own.

        Args:
            module: attention layer that calls; its number is its attribute `layer_idx`.
            query: [1, num_heads, num_tokens, dim]
            key, value: [1, num_kv_heads, num_tokens, dim]
            scaling: factor of the scores; None is one over the square root of dim.
            options: further arguments of the layer; `sliding_window`, `softcap` and `s_aux` (sinks) have an effect.

        Returns:
            [1, num_tokens, num_heads, dim]
        """


class PassHolder:
    """Holder of the running pass, shared by all attention modules of one model.

    Attributes:
        current: attention of the running pass; set before each pass.
    """

    __slots__ = ("current",)

    current: LayerAttention


def attach(model: PreTrainedModel, holder: PassHolder) -> None:
    """Make the model's layers attend by `slot_attention`, which finds the running pass in `holder`."""
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
    """Attend in place of Transformers' attention: same signature, same result, [1, num_tokens, num_heads, dim]."""
    holder: PassHolder = module.pass_holder  # type: ignore[assignment]
    options["attention_mask"] = attention_mask
    return holder.current.attend(module, query, key, value, scaling=scaling, options=options), None


# A name without a mask function of its own makes Transformers build no mask at all.
AttentionInterface.register(ATTENTION_NAME, slot_attention)


def scored_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scaling: float | None, options: Options
) -> Tensor:
    """Attend by plain operations: for layers that change the scores, and for devices without a fused operator.

    Heads that share keys read these only once.

    Args:
        query: [batch, num_heads, num_tokens, dim]
        keys, values: [batch, num_kv_heads, length, dim]
        mask: added to the scores, [num_tokens, length] or [batch, 1, num_tokens, length]; None is no mask.
        scaling: factor of the scores; None is one over the square root of dim.
        options: `softcap` bounds the scores; `s_aux`, [num_heads], are scores of a position without a value.

    Returns:
        [batch, num_heads, num_tokens, dim of the values]
    """
    batch, num_heads, num_tokens, dim = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, num_tokens, dim)  # [batch, num_kv_heads, group_size, ...]
    scores = (grouped @ keys[:, :, None].transpose(3, 4)).float() * (dim**-0.5 if scaling is None else scaling)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask.reshape(-1, 1, 1, *mask.shape[-2:])
    if sinks is not None:
        column = sinks.float().reshape(1, keys.shape[1], -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, column], dim=4)
    shares = torch.softmax(scores, dim=4)[..., : keys.shape[2]].to(values.dtype)
    return (shares @ values[:, :, None]).reshape(batch, num_heads, num_tokens, values.shape[3])


def changes_scores(options: Options) -> bool:
    """Return whether a layer's options change its scores beyond the mask."""
    return options.get("softcap") is not None or options.get("s_aux") is not None


class SpanAttention:
    """Attention of one span of a pass, with the masks for its queries, which all layers share.

    Attributes:
        slot: slot of the span.
        start: position of the span's first token.
        num_tokens: number of the span's tokens.
        end: position after the span's last token.
    """

    __slots__ = ("_kind", "_masks", "end", "num_tokens", "slot", "start")

    def __init__(self, span: Span, *, dtype: torch.dtype, device: torch.device) -> None:
        self.slot = span.slot
        self.start = span.start
        self.num_tokens = len(span.token_ids)
        self.end = span.start + self.num_tokens
        self._kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self._masks: dict[tuple[int, int], Tensor] = {}  # by window and repetitions; all layers share them

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float | None, options: Options) -> Tensor:
        """Attend from each token of the span to the positions of its slot up to its own.

        Args:
            query: [1, num_heads, num_tokens, dim]
            keys, values: all that the slot holds up to the span's end, [1, num_kv_heads, end, dim].
            scaling: factor of the scores; None is one over the square root of dim.
            options: further arguments of the layer; `sliding_window`, `softcap` and `s_aux` (sinks) have an effect.

        Returns:
            [1, num_heads, num_tokens, dim]
        """
        window = min(options.get("sliding_window") or self.end, self.end)
        first = max(0, self.start + 1 - window)
        if first:  # no query sees what is before
            keys, values = keys.narrow(2, first, self.end - first), values.narrow(2, first, self.end - first)
        if changes_scores(options):
            return scored_attention(query, keys, values, self._mask(window), scaling=scaling, options=options)
        num_heads, num_kv_heads = query.shape[1], keys.shape[1]
        is_causal = self.start == 0 and window == self.end and self.num_tokens > 1  # the plain triangle needs no tensor
        if num_heads == num_kv_heads or is_causal or self.num_tokens > MAX_FOLDED_TOKENS:
            return scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=None if is_causal else self._mask(window),
                is_causal=is_causal,
                scale=scaling,
                enable_gqa=num_heads != num_kv_heads,
            )
        # Heads that share keys become further queries of one head, so that the keys are read once.
        group_size = num_heads // num_kv_heads
        folded = query.reshape(1, num_kv_heads, group_size * self.num_tokens, query.shape[3])
        mask = self._mask(window, group_size)
        attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        return attended.reshape(1, num_heads, self.num_tokens, values.shape[3])

    def _mask(self, window: int, times: int = 1) -> Tensor | None:
        """Return the mask to add to scores, [times * num_tokens, num_keys], for the keys that at least one query sees.

        None for a single query, which sees all of these keys.

        Args:
            window: number of last positions that a query sees, its own among them.
            times: how often the rows are repeated, as for heads that are folded into queries.
        """
        if self.num_tokens == 1:
            return None
        if (window, times) not in self._masks:
            self._masks[window, times] = self._made_mask(window).repeat(times, 1)
        return self._masks[window, times]

    def _made_mask(self, window: int) -> Tensor:
        own = min(self.start, window - 1)  # column of the first query's own key
        shape = self.num_tokens, own + self.num_tokens
        mask = torch.full(shape, -torch.inf, **self._kind).triu_(own + 1)
        if window < self.end:
            mask += torch.full(shape, -torch.inf, **self._kind).tril_(own - window)
        return mask


class SlotPass:
    """A pass over spans: writes each span's keys and values to its slot, then attends to all of the slot so far.

    Its tokens are those of all spans in one row, span after span.

    Args:
        dtype, device: those of the masks.
        num_filling: tokens of the pass after the last span, which belong to no span; their attention is zeros.
    """

    def __init__(
        self,
        cache: SlotCache,
        spans: Sequence[Span],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_filling: int = 0,
    ) -> None:
        self._cache = cache
        self._spans = [SpanAttention(span, dtype=dtype, device=device) for span in spans]
        self._num_filling = num_filling
        self._widths = [*(span.num_tokens for span in self._spans), *([num_filling] if num_filling else [])]

    def attend(
        self, module: Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, options: Options
    ) -> Tensor:
        layer = _layer_index(module)
        if len(self._widths) == 1:
            return self._attend_span(layer, self._spans[0], query, key, value, scaling=scaling, options=options)
        pieces = zip(
            self._spans,
            torch.split(query, self._widths, dim=2),
            torch.split(key, self._widths, dim=2),
            torch.split(value, self._widths, dim=2),
            strict=False,
        )
        asked: dict[str, Any] = {"scaling": scaling, "options": options}
        attended = [self._attend_span(layer, span, q, k, v, **asked) for span, q, k, v in pieces]
        if self._num_filling:
            attended.append(query.new_zeros(1, self._num_filling, query.shape[1], value.shape[3]))
        return torch.cat(attended, dim=1)

    def _attend_span(
        self, layer: int, span: SpanAttention, query: Tensor, key: Tensor, value: Tensor, **asked: Any
    ) -> Tensor:
        keys, values = self._cache.write(layer, span.slot, span.start, key, value)
        return span.attend(query, keys, values, **asked).transpose(1, 2)  # [1, num_tokens, num_heads, dim]


class ShapeRecorder:
    """Attention of a test pass over one token: it records each layer's shapes, and refuses unsupported layers.

    Running the layers is surer than reading configurations, whose fields have other names in each family.

    Args:
        architecture: name of the model's architecture, for messages.
        windows: sliding window of each layer, from the configuration.
        max_length: positions of a slot; windows that are not smaller have no effect.

    Attributes:
        shapes: shape of the keys and values of each layer, by the layer's number.
    """

    def __init__(self, architecture: str, windows: Sequence[int | None], max_length: int) -> None:
        self._architecture = architecture
        self._windows = windows
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
        window, expected = options.get("sliding_window"), self._windows[_layer_index(module)]
        if window != expected and min(window or self._max_length, expected or self._max_length) < self._max_length:
            refused.append(f"a sliding window of {window}, and its configuration for {expected}")
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
