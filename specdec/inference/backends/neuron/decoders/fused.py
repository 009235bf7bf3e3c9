"""NxDI's fused speculation: draft and verification in one compiled graph; also the choice of decoder by method.

Either the host or the graph accepts draft tokens. By default the host does: it chooses the target's tokens from the
target's logits with its own seeded random numbers, and overrules the graph. This is safe, since keys and values of
rejected tokens are at positions that no later token reads before they are overwritten. So every request is served,
exactly as without a draft. With device_sampling the graph accepts, and a step brings only token ids to the host.
EAGLE's graph always accepts, since its draft goes on from the hidden state of the token that the graph kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specdec.inference.backends.checkpoint import load_config
from specdec.inference.backends.neuron.backend import Application, check_model, checked_config, slot_model
from specdec.inference.backends.neuron.decoders.device_decoder import DeviceDecoder
from specdec.inference.backends.neuron.decoders.device_target import TargetDecoder, target_compilation
from specdec.inference.backends.neuron.decoders.graph_decoder import GraphDecoder
from specdec.inference.backends.neuron.decoders.medusa import MedusaDecoder, medusa_compilation
from specdec.inference.backends.neuron.graphs.application import Compilation, fused_compilation
from specdec.inference.backends.neuron.graphs.calls import Row, fused_call
from specdec.inference.backends.neuron.graphs.checks import check_method, check_pair
from specdec.inference.backends.neuron.graphs.settings import device_top_k, fused_arguments, host_chooses
from specdec.inference.backends.neuron.graphs.shape import SlotShape
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, InternalError
from specdec.inference.model.decoder import Decide, Turn, Verdict


class HostFusedDecoder(GraphDecoder):
    """Fused pair whose tokens the host chooses; with a shape of width K, the graph drafts K - 1 tokens per step.

    Args:
        application: NxDI's application, loaded.
        shape: limits of the compiled graphs.
        decide: function that chooses tokens from the target's logits, and so verifies the draft's tokens.
    """

    keeps_grammars = True
    """True: requests with a grammar are served, since the host chooses the tokens.

    Fewer draft tokens are accepted then, as the draft does not know the grammar.
    """

    def __init__(self, application: Application, shape: SlotShape, decide: Decide) -> None:
        super().__init__(application, shape)
        self._decide = decide

    def _read_prompt(self, turn: Turn) -> Verdict:
        *_, logits = self._prompted(turn).fused_outputs  # [1, 1, vocab_size]
        (verdict,) = self._decided([replace(turn, proposal=())], logits)
        return verdict

    def _advance(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        rows = [Row(turn.slot, turn.start, turn.token_ids[-1:]) for turn in turns]
        # [num_rows, K], the last only for the draft's memory; [num_rows, K, vocab_size]
        *_, drafted, logits = self._application.forward(**fused_call(rows)).fused_outputs
        limits = [min(turn.gamma, self._shape.width - 1) for turn in turns]
        chains = [of_row[:limit] for of_row, limit in zip(drafted.tolist(), limits, strict=True)]
        proposed = [replace(turn, proposal=chain) for turn, chain in zip(turns, chains, strict=True)]
        verdicts = {turn.slot: verdict for turn, verdict in zip(turns, self._decided(proposed, logits), strict=True)}
        for turn in turns:
            self._held[turn.slot] = turn.start + len(verdicts[turn.slot].token_ids)
        return verdicts

    def _decided(self, turns: Sequence[Turn], logits: torch.Tensor) -> list[Verdict]:
        of_vocabulary = logits[..., : self.vocab_size].float().cpu().numpy()  # the output layer may be padded
        rows = [of_row[: len(turn.proposal) + 1] for turn, of_row in zip(turns, of_vocabulary, strict=True)]
        return self._decide(turns, np.concatenate(rows))


class FusedDecoder(DeviceDecoder):
    """Fused pair with acceptance in the graph; the width of its shape is K, the most tokens that one step commits."""

    def _read_prompt(self, turn: Turn) -> Verdict:
        accepted, *_ = self._prompted(turn, self._device_sampling(turn.sampling)).fused_outputs  # [1, K]
        return Verdict(self._token_ids(accepted[0], 1), num_draft_tokens=0, num_accepted_tokens=0)

    def _advance(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        rows = [Row(t.slot, t.start, t.token_ids[-1:], self._device_sampling(t.sampling)) for t in turns]
        outputs = self._application.forward(**fused_call(rows)).fused_outputs
        accepted, _, _, next_positions, *_ = outputs  # [num_rows, K] padded with -1; next_positions: [num_rows, 1]
        ends = next_positions.reshape(-1).tolist()
        return {
            turn.slot: self._verdict(turn, of_row, int(end) - turn.start)
            for turn, of_row, end in zip(turns, accepted, ends, strict=True)
        }

    def _verdict(self, turn: Turn, accepted: torch.Tensor, num_tokens: int) -> Verdict:
        """Return the result of a step for one sequence from the tokens that the graph accepted.

        Also note how many tokens the sequence's slot now has.

        Args:
            turn: one sequence's part in the step.
            accepted: int [K], the token ids, padded with -1.
            num_tokens: number of token ids; it counts the target's own token, which is not in the slot yet.
        """
        self._held[turn.slot] = turn.start + num_tokens
        token_ids = self._token_ids(accepted, num_tokens)
        return Verdict(token_ids, num_draft_tokens=self._shape.width - 1, num_accepted_tokens=num_tokens - 1)

    def _token_ids(self, accepted: torch.Tensor, num_tokens: int) -> tuple[int, ...]:
        token_ids = tuple(token_id for token_id in accepted.tolist() if token_id >= 0)
        if len(token_ids) != num_tokens:
            raise InternalError(f"NxDI accepted {accepted.tolist()}, but its next position says {num_tokens} tokens")
        return token_ids


def load_fused_decoder(target: ModelConfig, draft: ModelConfig | None, decide: Decide) -> GraphDecoder | None:
    """Load a decoder over a graph of NxDI's own; compile it if the folder of compiled models does not have it.

    Such graphs are those of a fused pair, of a target with Medusa heads, and of a target with --device_sampling.

    Args:
        draft: the draft model; with Medusa the target itself, which has the heads; None for a target alone.
        decide: function that chooses tokens from the target's logits, and verifies the draft's, on the host.

    Returns:
        The decoder; None for method vanilla without --device_sampling, which has no such graph.

    Raises:
        ConfigError: NxDI is missing, or the pair, the method or the settings cannot be used; the message names which.
    """
    options = target.neuron
    if options.method == "vanilla" and not options.device_sampling:
        return None
    if options.method == "vanilla" and draft is not None:
        raise ConfigError("device_sampling does not go with speculation_method vanilla and a draft: the host verifies")
    if options.method != "vanilla" and draft is None:
        raise ConfigError(
            f"speculation_method {options.method} needs a target and a draft model: use role fused_target"
        )
    (compilation,) = _compilations(target, draft)
    application, shape, max_top_k = compilation.load(), compilation.shape, device_top_k(compilation.arguments)
    if options.method == "medusa":
        return MedusaDecoder(application, shape, compilation.arguments)
    if options.method == "vanilla":
        return TargetDecoder(application, shape, method="target with --device_sampling", max_top_k=max_top_k)
    if host_chooses(target):
        return HostFusedDecoder(application, shape, decide)
    return FusedDecoder(
        application,
        shape,
        method=f"speculation_method {options.method}",
        max_top_k=max_top_k,
        remedy=": without --device_sampling it is served" if options.method == "fused" else "",
    )


def pair_compilation(target: ModelConfig, draft: ModelConfig) -> Compilation:
    """Check the configurations of target and draft; return what compiles and loads their fused graph.

    Raises:
        ConfigError: a model, the pair or the settings cannot be used.
    """
    target_words, length = checked_config(target)
    draft_words = load_config(draft.path)
    if target_words.model_type != draft_words.model_type:
        raise ConfigError(
            f"draft {draft.path} is a {draft_words.model_type}, target {target.path} a {target_words.model_type}: "
            "NxDI's fused graph needs one model type: use --speculation_method vanilla"
        )
    check_model(draft, draft_words, length)
    check_pair(target, draft, target_words, draft_words)
    arguments = fused_arguments(target, length=length)
    check_method(target, draft.path, target_words)
    return fused_compilation(target, draft, target_words, arguments)


def compile_models(target: ModelConfig | None, draft: ModelConfig | None) -> None:
    """Compile the given models, unless the folder of compiled models has them already.

    A target and a draft are compiled into one graph if the speculation method has one for both.

    Raises:
        ConfigError: NxDI is missing, or a model or the settings cannot be used.
    """
    for compilation in _compilations(target, draft):
        compilation.compiled()


def _compilations(target: ModelConfig | None, draft: ModelConfig | None) -> list[Compilation]:
    """Return what compiles and loads the given models.

    This is one compilation if the speculation method has one graph for target and draft, else one for each model that
    is not None.
    """
    if target is not None and target.neuron.method == "medusa":
        return [medusa_compilation(target)]
    if target is not None and draft is not None and target.neuron.method != "vanilla":
        return [pair_compilation(target, draft)]
    if target is not None and draft is None and target.neuron.device_sampling:
        return [target_compilation(target)]
    return [slot_model(config) for config in (target, draft) if config is not None]
