"""Linear layers over weights that oneDNN has rearranged: 6 tokens take about as long as 1, not twice as long.

Owns the replacement of a model's linear layers. The operators are private to torch (its compiler uses them), so the
replacement is tested on the spot and taken back where they are missing or compute something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, with weights [in_features, out_features]

logger = logging.getLogger(__name__)

PACKED_WIDTH = 8
"""Number of tokens per pass for which the layout is chosen; other numbers work too."""

MIN_WEIGHTS = 1 << 17
"""Least number of weights of a packed layer: packing costs some 10 us per call, and saves less in a smaller layer."""

TOLERANCE = 1e-4
"""Largest difference of a logit that packing may make, divided by the largest logit before, or by 1 if that is more."""


OPERATORS = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
OPERATORS.define("packed_linear(Tensor tokens, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]


def _product(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply [..., in_features] by a weight that oneDNN has rearranged; return [..., out_features]."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, "none", [], "")
    return output


@torch.library.register_fake("specdec::packed_linear", lib=OPERATORS)  # type: ignore[untyped-decorator]
def _shape(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])


OPERATORS.impl("packed_linear", _product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class PackedLinear(torch.nn.Module):
    """Layer that computes the same as `linear`, from weights that oneDNN has rearranged; float32, CPU, no gradients."""

    def __init__(self, linear: torch.nn.Linear | Conv1D) -> None:
        super().__init__()
        weight: torch.Tensor = linear.weight.detach()
        if isinstance(linear, Conv1D):
            weight = weight.T.contiguous()
        self.out_features, self.in_features = weight.shape
        # It is no buffer, since the layout has no strides that moving or saving a module could handle.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_WIDTH)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the products: [..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():  # inductor takes oneDNN's operator only over weights of its own making
            output: torch.Tensor = torch.ops.specdec.packed_linear(tokens, self._weight, self._bias)
            return output
        return _product(tokens, self._weight, self._bias)


def pack_linears(model: torch.nn.Module, logits: Callable[[], torch.Tensor]) -> None:
    """Replace the linear layers of a float32 model on CPU, if its logits stay the same; else log the reason.

    Args:
        logits: function that runs some tokens through the model in its present state and returns their logits.
    """
    before = logits()
    plain = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (torch.nn.Linear, Conv1D) and module.weight.numel() >= MIN_WEIGHTS
    }
    if not plain:
        return
    try:
        for name, linear in plain.items():
            model.set_submodule(name, PackedLinear(linear))
        error = float((logits() - before).abs().max() / before.abs().max().clamp(min=1.0))
    except Exception as failure:  # private operators may be missing, or change what they take
        reason = repr(failure)
    else:
        if error <= TOLERANCE:  # not if it is NaN
            logger.info("%d linear layers packed by oneDNN, off by %.1g", len(plain), error)
            return
        reason = f"off by {error:.2g}"
    for name, linear in plain.items():
        model.set_submodule(name, linear)
    logger.info("linear layers stay as they are, packing them fails: %s", reason)
