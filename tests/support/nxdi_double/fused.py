"""The double of `NeuronFusedSpecModel`, NxDI's graph of a fused pair (draft and target)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.support.nxdi_double.memory import Memory
from tests.support.nxdi_double.rooms import fill, last_index, read_rooms, scatter

PADDING = -1


class Part(torch.nn.Module):
    """The draft or the target in the double of a fused graph; its weights and KV cache are in a `Memory`."""

    def __init__(self, config: Any, neuron_config: Any) -> None:
        super().__init__()
        self._config = neuron_config  # the target's: batches and lengths are its affair
        self._has_logits = config.neuron_config.output_logits
        states = [torch.empty(0) for _ in range(2 * config.num_hidden_layers)]
        self.kv_mgr = SimpleNamespace(past_key_values=states)
        self.memory: Memory | None = None

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: list[int],
    ) -> list[Any]:
        """Return [token ids, logits if the configuration asks for them, then NxDI's placeholders for the KV cache]."""
        logits = self._logits(input_ids, attention_mask, position_ids, seq_ids)
        return [logits.argmax(-1), *([logits] if self._has_logits else []), *self.kv_mgr.past_key_values]

    def _logits(
        self, input_ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, seq_ids: list[int]
    ) -> torch.Tensor:
        assert self.memory is not None
        if input_ids.shape[1] in (1, self._config.speculation_length):
            logits, new = self.memory.run(input_ids, position_ids, mask, read_rooms(self._config, seq_ids))
            scatter(self._config, self.memory, new, position_ids, seq_ids)
            return logits
        logits, new = self.memory.run(input_ids, position_ids, torch.zeros(len(seq_ids), 0), seq_ids)
        fill(self.memory, new, seq_ids[0], int(mask.sum()))
        return logits.gather(1, last_index(position_ids)[..., None].expand(-1, 1, logits.shape[2]))


class NeuronFusedSpecModel(torch.nn.Module):
    """Draft and target in one graph; a call's outputs are in NxDI's order: tokens and logits, then the KV cache."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.neuron_config = config, config.neuron_config
        self.draft_model = Part(config.fused_spec_config.draft_config, self.neuron_config)
        self.target_model = Part(config, self.neuron_config)

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *others: Any) -> list[Any]:
        if input_ids.shape[1] > 1:
            outputs = self._context_encoding_forward(input_ids, attention_mask, position_ids, *others)
            return self._first_token(outputs[1], attention_mask) + outputs[2:]
        outputs = self._token_gen_forward(input_ids, attention_mask, position_ids, *others)
        return self._accept(outputs[0], outputs[1], position_ids) + outputs[2:]

    def _context_encoding_forward(self, *args: Any) -> list[Any]:
        target, draft = self.target_model(*args), self.draft_model(*args)
        if self.neuron_config.output_logits:
            return [draft[0], target[0], draft[1], target[1], *draft[1:], *target[1:]]  # both logits are listed twice
        return [draft[0], target[0], *draft[1:], *target[1:]]

    def _token_gen_forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *others: Any) -> list[Any]:
        """Run the draft for K greedy tokens, then the target over the last token and the first K - 1 of these.

        The draft's K-th step exists for its KV cache: all of its K tokens but the last are proposed. K is
        `speculation_length`.
        """
        num_heads = 2 if self.neuron_config.output_logits else 1
        tokens, mask, drafted = [input_ids], attention_mask.clone(), []
        for step in range(self.neuron_config.speculation_length):
            position = position_ids + step
            outputs = self.draft_model(tokens[-1], mask, position, *others)
            tokens.append(outputs[0].view(len(position), -1))
            drafted.append(outputs[1])
            mask.index_fill_(1, position.squeeze(1), 1)  # of every row, in the masks of all
        positions = position_ids + torch.arange(self.neuron_config.speculation_length)  # [num_rows, K]
        target = self.target_model(torch.cat(tokens[:-1], 1), attention_mask, positions, *others)
        logits = [torch.cat(drafted, 1), target[1]] if self.neuron_config.output_logits else []
        return [torch.cat(tokens[1:], 1), target[0], *logits, *outputs[num_heads:], *target[num_heads:]]

    def _first_token(self, token_ids: torch.Tensor, mask: torch.Tensor) -> list[Any]:
        accepted = torch.full((1, self.neuron_config.speculation_length), PADDING, dtype=torch.int32)
        accepted[:, :1] = token_ids
        return [accepted, accepted[:, :1], mask, mask.sum(1, keepdim=True).int()]

    def _accept(self, candidates: torch.Tensor, tokens: torch.Tensor, position_ids: torch.Tensor) -> list[Any]:
        matches = (candidates[:, :-1] == tokens[:, :-1]).long().cumprod(1).sum(1, keepdim=True) + 1  # [num_rows, 1]
        kept = torch.arange(tokens.shape[1]) < matches
        accepted = torch.where(kept, tokens, PADDING).int()
        return [accepted, accepted.gather(1, matches - 1), kept, (position_ids + matches).int()]

    def split(self, outputs: list[Any]) -> list[Any]:
        """Return a call's outputs without the placeholders for the KV cache.

        Raises:
            RuntimeError: the placeholders are not at the indices that NxDI's table of aliases has for them.
        """
        states = [*self.draft_model.kv_mgr.past_key_values, *self.target_model.kv_mgr.past_key_values]
        num_heads = 6 if self.neuron_config.output_logits else 4
        found = outputs[num_heads:]
        if len(found) != len(states) or any(a is not b for a, b in zip(found, states, strict=True)):
            raise RuntimeError(f"{len(outputs)} outputs do not fit {len(states)} states behind the first {num_heads}")
        return outputs[:num_heads]
