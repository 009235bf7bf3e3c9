"""Medusa in NxDI: heads of the target guess the next tokens, and one compiled pass verifies a tree of guesses.

Decoding is greedy, and exact. The graph takes the tree, a mask and positions, and returns the best token ids of the
target and the heads; this module decides which guesses are accepted. NxDI's own loop moves the keys and values of
accepted guesses within the next pass, but that move is lost afterwards (`KVCacheManager.update_cache` starts from the
unmoved memory). So nothing is moved here: accepted guesses that are not at their own positions are read again, as
ancestors of the next tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.inference.backends.neuron.backend import Application, checked_config
from specdec.inference.backends.neuron.decoders.device_decoder import DeviceDecoder
from specdec.inference.backends.neuron.graphs.application import Compilation, slot_compilation
from specdec.inference.backends.neuron.graphs.calls import medusa_call
from specdec.inference.backends.neuron.graphs.checks import check_medusa
from specdec.inference.backends.neuron.graphs.medusa_tree import Choice, num_ranks, tree_pass
from specdec.inference.backends.neuron.graphs.settings import medusa_arguments
from specdec.inference.backends.neuron.graphs.shape import SlotShape
from specdec.inference.config import ModelConfig
from specdec.inference.model.decoder import Turn, Verdict


class MedusaDecoder(DeviceDecoder):
    """Target with Medusa heads, with one slot.

    Args:
        application: NxDI's application, loaded.
        shape: its width is the number of nodes of the compiled pass.
        arguments: the NeuronConfig arguments of the compiled model, with the guess tree and the number of heads.
    """

    def __init__(self, application: Application, shape: SlotShape, arguments: Mapping[str, Any]) -> None:
        super().__init__(application, shape, method="speculation_method medusa")
        self._choices: list[Choice] = sorted(map(tuple, arguments["medusa_tree"]))
        self._num_heads: int = arguments["num_medusa_heads"]
        self._sampling = (float(num_ranks(self._choices)), 1.0, 1.0)  # top_k: number of ids wanted from every head
        self._num_placed = 0  # tokens with keys and values at their own positions
        self._guesses: list[list[int]] = []  # of every head, for the tokens after the last committed one

    def _read_prompt(self, turn: Turn) -> Verdict:
        ids = self._prompted(turn, self._sampling).hidden_states  # [1 + num_heads, 1, top_k] token ids, likeliest first
        self._num_placed = len(turn.token_ids)
        self._guesses = ids[1:, 0].tolist()
        return Verdict((int(ids[0, 0, 0]),), num_draft_tokens=0, num_accepted_tokens=0)

    def _advance(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        (turn,) = turns
        chain = turn.token_ids[self._num_placed :]
        tree = tree_pass(chain, self._choices, self._guesses, width=self._shape.width)
        call = medusa_call(
            tree, start=self._num_placed, width=self._shape.width, num_heads=self._num_heads, sampling=self._sampling
        )
        ids = self._application.forward(**call).hidden_states[:, 0]  # [1 + num_heads, width, top_k]
        chosen = ids[0, :, 0].tolist()
        path = tree.accepted(chosen)
        last = path[-1] if path else tree.root
        self._guesses = ids[1:, last].tolist()
        self._num_placed += len(chain) + tree.num_in_place(path)
        self._held[turn.slot] = len(turn.token_ids) + len(path)
        token_ids = (*(tree.token_ids[node] for node in path), chosen[last])
        return {turn.slot: Verdict(token_ids, num_draft_tokens=tree.num_guesses, num_accepted_tokens=len(path))}


def medusa_compilation(target: ModelConfig) -> Compilation:
    """Check the configuration of a target and its heads; return their compilation.

    Raises:
        ConfigError: the checkpoint, its heads or the tree cannot be used; the message names which.
    """
    model_config, length = checked_config(target)
    check_medusa(target, model_config)
    return slot_compilation(target, model_config, medusa_arguments(target, length=length))
