"""What all of NxDI's own speculation graphs have in common: they hand out tokens, not logits.

So each of them is a `Decoder`, not a slot model. Owns which slot holds how much, and what a request may ask for; what a
step is, is each graph's own affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from inference.backends.neuron.calls import GREEDY
from inference.backends.neuron.shape import SlotShape
from inference.backends.neuron.slots import Application
from inference.errors import InvalidRequestError
from inference.model import Turn, Verdict
from inference.request import GenerationRequest, SamplingParams

_NOTHING = Verdict(token_ids=(), num_draft_tokens=0, num_accepted_tokens=0)


class GraphDecoder(ABC):
    """A compiled graph that drafts and verifies, and its slots; see `inference.model.Decoder`.

    Args:
        application: loaded.
        shape: what was compiled; its width is the widest that a step can be.
        method: for messages.
        max_top_k: what sampling on the device looks at, at most; 0 is a graph that is greedy only.
    """

    def __init__(self, application: Application, shape: SlotShape, *, method: str, max_top_k: int = 0) -> None:
        self._application = application
        self._shape = shape
        self._method = method
        self._max_top_k = max_top_k
        self._held = [0] * shape.num_slots  # tokens of each slot whose keys and values the graph has

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    @property
    def num_slots(self) -> int:
        return self._shape.num_slots

    @property
    def max_length(self) -> int:
        """Positions that a slot holds, less those that a step may write behind the last valid one."""
        return self._shape.max_length

    @property
    def slot_bytes(self) -> int:
        """Of the target."""
        return self._shape.slot_bytes

    @property
    def seed_invariant(self) -> bool:
        """See `inference.model.LimitedDecoder`."""
        return not self._max_top_k

    @property
    def prompt_chunk_tokens(self) -> int:
        """See `inference.model.Decoder`: a prompt is read at once."""
        return self._shape.length

    def check(self, request: GenerationRequest) -> None:
        """See `inference.model.LimitedDecoder`."""
        for field, fault in self._faults(request):
            raise InvalidRequestError(
                f"{fault}: this server's speculation_method {self._method} cannot do that", field=field
            )

    def _faults(self, request: GenerationRequest) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)"""
        num_tokens = len(request.prompt_token_ids)
        if num_tokens > self._shape.max_prompt:
            limit = self._shape.max_prompt
            yield "prompt", f"the prompt has {num_tokens} tokens, the compiled prompt graph reads {limit}"
        if request.logprobs is not None:
            yield "logprobs", f"logprobs {request.logprobs}"
        if request.prompt_logprobs is not None:
            yield "prompt_logprobs", f"prompt_logprobs {request.prompt_logprobs}"
        if request.min_new_tokens:
            yield "min_new_tokens", f"min_new_tokens {request.min_new_tokens}"
        yield from _changed_logits(request.sampling)
        if not request.sampling.greedy:
            yield from self._sampling_faults(request.sampling)

    def _sampling_faults(self, sampling: SamplingParams) -> Iterator[tuple[str, str]]:
        if not self._max_top_k:
            yield "temperature", f"temperature {sampling.temperature} (only 0 is greedy)"
        if sampling.min_p > 0:
            yield "min_p", f"min_p {sampling.min_p}"
        if not 1 <= sampling.top_k <= self._max_top_k:
            yield "top_k", f"top_k {sampling.top_k} (it must be 1..{self._max_top_k})"

    @torch.no_grad()
    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Read the prompts of new sequences, one by one; take one step with all others."""
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
        """Whether the slot holds all of the turn's tokens but the last."""
        return turn.start > 0 and self._held[turn.slot] == turn.start == len(turn.token_ids) - 1

    @abstractmethod
    def _read_prompt(self, turn: Turn) -> Verdict:
        """Read all of a turn's tokens; one token follows."""

    @abstractmethod
    def _advance(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        """One step of sequences whose slots hold all tokens but the last; verdicts by slot."""


def _changed_logits(sampling: SamplingParams) -> Iterator[tuple[str, str]]:
    """What changes the greedy choice too, and needs logits."""
    if sampling.repetition_penalty != 1:
        yield "repetition_penalty", f"repetition_penalty {sampling.repetition_penalty}"
    if sampling.presence_penalty:
        yield "presence_penalty", f"presence_penalty {sampling.presence_penalty}"
    if sampling.frequency_penalty:
        yield "frequency_penalty", f"frequency_penalty {sampling.frequency_penalty}"
    if sampling.logit_bias:
        yield "logit_bias", "logit_bias"


def device_sampling(sampling: SamplingParams) -> tuple[float, float, float]:
    """top_k, top_p, temperature of a row."""
    if sampling.greedy:
        return GREEDY
    return (float(sampling.top_k), sampling.top_p, sampling.temperature)
