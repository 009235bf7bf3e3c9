"""Common base of the decoders over NxDI's own graphs.

A step of such a graph does more than a pass over given tokens: it drafts, or chooses tokens. So it cannot be a
`Backend` (model/slots.py), whose passes return logits. The base counts the tokens that each slot holds; each subclass
runs the steps of one kind of graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from specdec.inference.backends.neuron.backend import Application, CompiledModel
from specdec.inference.backends.neuron.graphs.calls import GREEDY, Row, prompt_call
from specdec.inference.backends.neuron.graphs.shape import SlotShape
from specdec.inference.errors import InvalidRequestError
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.request import GenerationRequest

_NOTHING = Verdict(token_ids=(), num_draft_tokens=0, num_accepted_tokens=0)


class GraphDecoder(CompiledModel, ABC):
    """Decoder (`specdec.inference.model.decoder.Decoder`) over a compiled graph and its slots.

    After a prompt, the target reads at most `shape.width` tokens of a sequence in one step.
    """

    seed_invariant = True
    keeps_grammars = False

    def __init__(self, application: Application, shape: SlotShape) -> None:
        super().__init__(application, shape)
        self._held = [0] * shape.num_slots  # number of tokens in each slot's memory
        self.prompt_chunk_tokens = shape.length  # a prompt is read in one call

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequestError if the prompt is too long for the compiled graph, or prompt_logprobs are wanted."""
        num_tokens = len(request.prompt_token_ids)
        if num_tokens > self._shape.max_prompt:
            limit = self._shape.max_prompt
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens, the compiled prompt graph reads {limit}", field="prompt"
            )
        if request.prompt_logprobs is not None:
            asked = f"prompt_logprobs {request.prompt_logprobs}"
            raise InvalidRequestError(
                f"{asked}: this server's compiled prompt graph gives nothing but what follows the last token",
                field="prompt_logprobs",
            )

    @torch.no_grad()
    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Read the prompts of new sequences one by one; take one step with all other sequences.

        Returns:
            For each turn, which is one sequence's part in the step, the tokens that it commits; none if it wants none.
        """
        verdicts = {turn.slot: _NOTHING for turn in turns}
        wanted = [turn for turn in turns if turn.chooses]
        going_on = sorted((turn for turn in wanted if self._goes_on(turn)), key=lambda turn: turn.slot)
        for turn in wanted:
            if not self._goes_on(turn):
                verdicts[turn.slot] = self._read_prompt(turn)
                self._held[turn.slot] = len(turn.token_ids)
        if going_on:
            verdicts.update(self._advance(going_on))
        return [verdicts[turn.slot] for turn in turns]

    def _goes_on(self, turn: Turn) -> bool:
        """Return whether the slot of `turn` holds all of the sequence's tokens but the last."""
        return turn.start > 0 and self._held[turn.slot] == turn.start == len(turn.token_ids) - 1

    def _prompted(self, turn: Turn, sampling: tuple[float, float, float] = GREEDY) -> Any:
        """Run the prompt graph over the tokens of `turn`, one sequence's part in the step; return its output."""
        call = prompt_call(Row(turn.slot, 0, turn.token_ids, sampling), widest=self._shape.prompt_width)
        return self._application.forward(**call)

    @abstractmethod
    def _read_prompt(self, turn: Turn) -> Verdict:
        """Read all tokens of a sequence by the prompt graph; return the one token that follows as the step's result."""

    @abstractmethod
    def _advance(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        """Take one step with sequences that have all tokens but the last in their slots.

        Returns:
            For each sequence, by its slot, the tokens that the step commits.
        """
