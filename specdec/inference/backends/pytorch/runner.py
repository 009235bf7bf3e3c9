"""A Transformers model whose attention each pass provides, and its properties, found by a test pass.

Knows nothing of the order of spans, of the shapes of passes, or of compilers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.inference.backends.architectures import architecture_name, forward_arguments, layer_windows
from specdec.inference.backends.pytorch.attention import LayerAttention, PassHolder, ShapeRecorder, attach
from specdec.inference.backends.pytorch.slot_cache import LayerShape
from specdec.inference.errors import ConfigError, UnsupportedModelError


class ModelRunner:
    """A model whose attention modules call the attention object of the running pass. The model has no other user.

    Args:
        max_length: positions of a slot.

    Attributes:
        model: the model, in evaluation mode.
        vocab_size: number of columns of the logits.
        layers: shapes of the keys and values that each layer stores.

    Raises:
        UnsupportedModelError: slots of keys and values cannot carry this architecture.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self.model = model.eval()
        # Transformers 4 counts positions from an empty cache unless they are passed by this name too.
        self._takes_cache_position = "cache_position" in forward_arguments(model)
        self._holder = PassHolder()
        attach(model, self._holder)
        self.vocab_size, self.layers = self._probe(max_length)

    def logits(self, inputs: Tensor, running: LayerAttention, rows: Sequence[int] | int = 0) -> Tensor:
        """Run the model over the tokens of one pass; return logits.

        Args:
            inputs: token ids and positions, [2, num_tokens].
            running: attention of this pass.
            rows: numbers of the tokens that are to have logits, or how many of the last ones are; 0 is all tokens.

        Returns:
            [num_rows, vocab_size], in the model's dtype.
        """
        arguments = self._arguments(inputs, running)
        keep = rows if isinstance(rows, int) else torch.tensor(rows).to(inputs.device, non_blocking=True)
        logits: Tensor = self.model(**arguments, logits_to_keep=keep).logits  # [1, num_rows, vocab_size]
        return logits[0]

    def read(self, inputs: Tensor, running: LayerAttention) -> None:
        """Run the model without its output layer, which a part of a prompt does not need; no logits are computed.

        Args:
            inputs: token ids and positions, [2, num_tokens].
            running: attention of this pass, which stores the keys and values.
        """
        self.model.base_model(**self._arguments(inputs, running))

    def _arguments(self, inputs: Tensor, running: LayerAttention) -> dict[str, Any]:
        self._holder.current = running
        place = {"cache_position": inputs[1]} if self._takes_cache_position else {}  # [num_tokens]
        return {"input_ids": inputs[0:1], "position_ids": inputs[1:2], "use_cache": False, **place}  # [1, num_tokens]

    @torch.inference_mode()
    def _probe(self, max_length: int) -> tuple[int, list[LayerShape]]:
        """Run one token, at the last position; return the vocabulary's size and the shapes that each layer stores.

        Raises:
            UnsupportedModelError: the token cannot be run, or the layers do not call the attention of the pass.
        """
        config = self.model.config
        architecture = architecture_name(config)
        recorder = ShapeRecorder(architecture, layer_windows(config), max_length)
        try:
            logits = self.logits(torch.tensor([[0], [max_length - 1]], device=self.model.device), recorder)
        except ConfigError:
            raise
        except Exception as error:  # such as a layer that indexes the mask which it is not given
            raise UnsupportedModelError(f"{architecture} is not supported: one token fails with {error!r}") from error
        shapes = [recorder.shapes[layer] for layer in sorted(recorder.shapes)]
        if len(shapes) != config.get_text_config().num_hidden_layers:
            raise UnsupportedModelError(f"{architecture} is not supported: its attention cannot be replaced")
        return logits.shape[1], shapes
