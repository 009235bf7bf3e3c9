"""NxDI's fused speculation: draft, verification and acceptance in one compiled graph.

Greedy modes are exact. A mode that samples on the device (EAGLE with do_sample) keeps the target's law, but not the
seed: equal seeds need not give equal tokens, so a seed is refused there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference.backends.architectures import require_supported_config, resolve_length
from inference.backends.checkpoint import load_config
from inference.backends.neuron.application import Compilation, fused_compilation
from inference.backends.neuron.calls import Row, fused_call, prompt_call
from inference.backends.neuron.checks import check_method, check_pair, check_sharding
from inference.backends.neuron.environment import check_logical_cores
from inference.backends.neuron.graph_decoder import GraphDecoder, device_sampling
from inference.backends.neuron.medusa import load_medusa_decoder
from inference.backends.neuron.settings import device_top_k, fused_arguments
from inference.backends.neuron.shape import SlotShape, slot_shape
from inference.config import ModelConfig
from inference.errors import ConfigError, InternalError
from inference.model import Turn, Verdict


class FusedDecoder(GraphDecoder):
    """A fused pair and its slots; the width of its shape is K, the tokens that one step commits at most."""

    def _read_prompt(self, turn: Turn) -> Verdict:
        call = prompt_call(Row(turn.slot, 0, turn.token_ids, device_sampling(turn.sampling)))
        accepted, _, _, _, *_ = self._application.forward(**call).fused_outputs  # accepted: [1, K]
        return Verdict(self._token_ids(accepted[0], 1), num_draft_tokens=0, num_accepted_tokens=0)

    def _advance(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        rows = [_row(turn) for turn in turns]
        outputs = self._application.forward(**fused_call(rows)).fused_outputs
        accepted, _, _, next_positions, *_ = outputs  # [num_rows, K] padded with -1; next_positions: [num_rows, 1]
        ends = next_positions.reshape(-1).tolist()
        return {
            turn.slot: self._verdict(turn, of_row, int(end) - turn.start)
            for turn, of_row, end in zip(turns, accepted, ends, strict=True)
        }

    def _verdict(self, turn: Turn, accepted: torch.Tensor, num_tokens: int) -> Verdict:
        """`num_tokens` counts the target's own token, whose keys and values are not in the slot yet."""
        self._held[turn.slot] = turn.start + num_tokens
        token_ids = self._token_ids(accepted, num_tokens)
        return Verdict(token_ids, num_draft_tokens=self._shape.width - 1, num_accepted_tokens=num_tokens - 1)

    def _token_ids(self, accepted: torch.Tensor, num_tokens: int) -> tuple[int, ...]:
        token_ids = tuple(token_id for token_id in accepted.tolist() if token_id >= 0)
        if len(token_ids) != num_tokens:
            raise InternalError(f"NxDI accepted {accepted.tolist()}, but its next position says {num_tokens} tokens")
        return token_ids


def _row(turn: Turn) -> Row:
    return Row(turn.slot, turn.start, turn.token_ids[-1:], device_sampling(turn.sampling))


def load_fused_decoder(target: ModelConfig, draft: ModelConfig) -> GraphDecoder | None:
    """Load a pair, or a target with Medusa heads, into one graph; compiles it first unless that was done before.

    Returns:
        None if the method is not one of NxDI's own graphs.

    Raises:
        ConfigError: NxDI is not here, or the pair, the method or the settings cannot be used; the message names which.
    """
    method = target.neuron.method
    if method == "vanilla":
        return None
    if method == "medusa":
        return load_medusa_decoder(target)
    compilation, shape = prepare_fused(target, draft)
    max_top_k = device_top_k(target.neuron.overrides)
    return FusedDecoder(compilation.load(), shape, method=method, max_top_k=max_top_k)


def compile_fused_decoder(target: ModelConfig, draft: ModelConfig) -> None:
    """Compile ahead of time what `load_fused_decoder` would load."""
    compilation, _ = prepare_fused(target, draft)
    compilation.compiled()


def prepare_fused(target: ModelConfig, draft: ModelConfig) -> tuple[Compilation, SlotShape]:
    """Check everything, build NxDI's configuration, and say what the compiled pair will be."""
    check_logical_cores(target.neuron.overrides)
    target_words, draft_words = load_config(target.path), load_config(draft.path)
    if target_words.model_type != draft_words.model_type:
        raise ConfigError(
            f"draft {draft.path} is a {draft_words.model_type}, target {target.path} a {target_words.model_type}: "
            "NxDI's fused graph needs one model type: use --speculation_method vanilla"
        )
    length = resolve_length(target_words, target.sequence_length)
    for config, words in ((target, target_words), (draft, draft_words)):
        require_supported_config(words, length)
        check_sharding(config.path, words, config.neuron.tp_degree)
    check_pair(target, draft, target_words, draft_words)
    arguments = fused_arguments(target, length=length)
    check_method(target, draft.path, target_words)
    return fused_compilation(target, draft, target_words, arguments), slot_shape(target_words, arguments)
