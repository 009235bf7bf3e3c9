"""Changes to NxDI's graph of a fused pair, made before it is compiled.

Classes derived from NxDI's make two changes. EAGLE's graph, which has code of its own, stays as it is:

- NxDI marks each draft token of one sequence as written in the masks of all, so that the others' drafts read
  unwritten slots: answers stay right, but fewer drafts are accepted. Here each row's mask comes from its own position.
- Where the host chooses the tokens, the graph returns the target's logits. NxDI lists logits twice among the results
  of the prompt graph, which then exceed the memory that NxDI reserves for them. It also gathers the draft's logits from
  all cores, where only the draft's tokens are needed. So here the draft returns its tokens in the place of logits.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec.inference.backends.devices import load_module

NUM_HEADS = 4
"""Number of outputs before keys and values in a fused pair's graph: tokens of draft and target, logits of both."""


def corrected(base: Any, *, host_chooses: bool) -> Any:
    """Return NxDI's class of a model, with both changes that this module describes in its fused graph.

    Args:
        base: NxDI's class, such as NeuronLlamaForCausalLM.
        host_chooses: True if the host chooses the tokens, so the target's configuration has `output_logits`. A call's
            `fused_outputs` are then the first four outputs of NxDI's graph, the draft's tokens int32 [num_rows, K], and
            the target's logits float32 [num_rows, K, vocabulary]; for a prompt, [1, 1] and [1, 1, vocabulary].
    """
    graph = _graph_class(host_chooses=host_chooses)

    def enable_context_encoding(self: Any, **keywords: Any) -> None:
        self._model_cls = graph  # NxDI has just set its own class, and makes its graphs here
        base.enable_context_encoding(self, **keywords)

    return type(base.__name__, (base,), {"enable_context_encoding": enable_context_encoding})


def _graph_class(*, host_chooses: bool) -> Any:
    fused: Any = load_module("neuronx_distributed_inference.models.model_base").NeuronFusedSpecModel

    class FusedGraph(fused):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.draft_model.register_forward_pre_hook(_with_own_mask)

    class LogitsGraph(FusedGraph):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.draft_model.register_forward_hook(_with_tokens_for_logits)

        def _context_encoding_forward(self, *args: Any, **keywords: Any) -> list[Any]:
            outputs = super()._context_encoding_forward(*args, **keywords)
            return _listed_once(outputs, len(self.draft_model.kv_mgr.past_key_values))

    return LogitsGraph if host_chooses else FusedGraph


def _with_own_mask(draft: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of one draft step with a new mask: each row sees the positions before its own token's.

    A hook that torch calls before the draft's forward. A pass over a prompt keeps its mask.

    Args:
        draft: the draft's module, which is not used.
        args: token ids [num_rows, num_tokens], mask [num_rows, length], positions [num_rows, num_tokens], and others
            that stay as they are; num_tokens is 1 except in a prompt.
    """
    input_ids, mask, position_ids, *others = args
    if input_ids.shape[-1] == 1:  # not a prompt
        columns = torch.arange(mask.shape[-1], device=mask.device)
        mask = (columns < position_ids).to(mask.dtype)  # [num_rows, length]
    return (input_ids, mask, position_ids, *others)


def _with_tokens_for_logits(draft: Any, args: tuple[Any, ...], outputs: list[Any]) -> list[Any]:
    """Return one draft step's outputs, with its tokens a second time, [num_rows, 1], where NxDI expects logits.

    A hook that torch calls after the draft's forward.

    Args:
        draft: the draft's module, which is not used.
        args: arguments of the forward, which are not used.
        outputs: the tokens, then keys and values of the layers; the tokens' copy is put between these.
    """
    tokens, *states = outputs
    return [tokens, tokens.reshape(tokens.shape[0], -1), *states]


def _listed_once(outputs: list[Any], num_draft_states: int) -> list[Any]:
    """Return a prompt graph's outputs without the second listing of each model's logits.

    Args:
        outputs: NUM_HEADS outputs, logits of both models among them; the draft's logits again, and its keys and values;
            the target's logits again, and its keys and values.
        num_draft_states: number of tensors with the draft's keys and values.
    """
    second = NUM_HEADS + 1 + num_draft_states
    return [*outputs[:NUM_HEADS], *outputs[NUM_HEADS + 1 : second], *outputs[second + 1 :]]
