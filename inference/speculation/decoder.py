"""Decoders made of slot models: one target pass over many sequences, with or without draft tokens to verify."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inference.sampling import choose_tokens
from inference.speculation.verify import verify
from inference.types import Backend, SamplingParams, Span, Turn, Verdict

_NOTHING = Verdict(token_ids=(), num_accepted_tokens=0)


class SlotDecoder:
    """The `Decoder` over a slot model: every turn is one span of the same pass."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Run one pass and verify each turn's proposal."""
        logits = self._backend.forward([_span(turn) for turn in turns])
        sampling: list[SamplingParams] = []
        positions: list[int] = []
        for turn in turns:
            sampling.extend([turn.sampling] * _num_choices(turn))
            first = turn.start + len(turn.token_ids)
            positions.extend(range(first, first + _num_choices(turn)))
        chosen = iter(choose_tokens(logits, sampling, positions) if sampling else ())
        return [_verdict(turn, chosen) for turn in turns]


def _num_choices(turn: Turn) -> int:
    return len(turn.proposal) + 1 if turn.chooses else 0


def _span(turn: Turn) -> Span:
    token_ids = [*turn.token_ids, *turn.proposal]
    return Span(slot=turn.slot, start=turn.start, token_ids=token_ids, num_logits=_num_choices(turn))


def _verdict(turn: Turn, chosen: Iterator[int]) -> Verdict:
    if not turn.chooses:
        return _NOTHING
    return verify([next(chosen) for _ in range(_num_choices(turn))], turn.proposal)
