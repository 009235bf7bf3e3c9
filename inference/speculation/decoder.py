"""Decoders made of slot models: one target pass over many sequences, with draft tokens to verify or without.

`SlotDecoder` verifies what it is given. `SpeculativeDecoder` lets a proposer of this process draft first: the fused
topology.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from inference.logprobs import token_logprobs
from inference.penalties import TokensBefore, rows_before
from inference.sampling import choose_tokens
from inference.speculation.verify import verify
from inference.types import Array, Backend, Decoder, Draft, Proposer, SamplingParams, Span, Turn, Verdict

_NOTHING = Verdict(token_ids=(), num_draft_tokens=0, num_accepted_tokens=0)


class SlotDecoder:
    """The `Decoder` over a slot model: every turn is one span of the same pass."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Run one pass and verify each turn's proposal."""
        logits = self._backend.forward([_span(turn) for turn in turns])
        chosen = iter(_choose(logits, [turn for turn in turns if turn.chooses]))
        return _with_logprobs(turns, [_verdict(turn, chosen) for turn in turns], logits)


def _choose(logits: Array, turns: Sequence[Turn]) -> list[int]:
    """The target's token of every row."""
    sampling: list[SamplingParams] = []
    positions: list[int] = []
    before: list[TokensBefore] = []
    for turn in turns:
        sampling.extend([turn.sampling] * _num_choices(turn))
        positions.extend(range(len(turn.token_ids), len(turn.token_ids) + _num_choices(turn)))
        before.extend(
            rows_before(turn.token_ids, turn.proposal, output_start=turn.output_start, sampling=turn.sampling)
        )
    return choose_tokens(logits, sampling, positions, before) if sampling else []


def _with_logprobs(turns: Sequence[Turn], verdicts: list[Verdict], logits: Array) -> list[Verdict]:
    """The verdicts, with log-probabilities for the turns that ask."""
    row = 0
    for i, (turn, verdict) in enumerate(zip(turns, verdicts, strict=True)):
        if turn.logprobs is not None and verdict.token_ids:
            rows = logits[row : row + len(verdict.token_ids)]  # [num_tokens, vocab_size]
            verdicts[i] = replace(verdict, logprobs=token_logprobs(rows, verdict.token_ids, turn.logprobs))
        row += _num_choices(turn)
    return verdicts


def _num_choices(turn: Turn) -> int:
    return len(turn.proposal) + 1 if turn.chooses else 0


def _span(turn: Turn) -> Span:
    token_ids = [*turn.token_ids[turn.start :], *turn.proposal]
    return Span(slot=turn.slot, start=turn.start, token_ids=token_ids, num_logits=_num_choices(turn))


def _verdict(turn: Turn, chosen: Iterator[int]) -> Verdict:
    if not turn.chooses:
        return _NOTHING
    return verify([next(chosen) for _ in range(_num_choices(turn))], turn.proposal)


class SpeculativeDecoder:
    """A proposer in front of a decoder: drafts for every turn that has no proposal, then takes the target's step.

    Args:
        target: verifies.
        proposer: has a slot for each of the target's, under the same number.
    """

    def __init__(self, target: Decoder, proposer: Proposer) -> None:
        self._target = target
        self._proposer = proposer

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Draft up to each turn's gamma in batched steps, then verify all in one pass."""
        started = time.monotonic()
        self._read(turns)
        proposals = self._draft([turn for turn in turns if turn.chooses and turn.gamma and not turn.proposal])
        draft_us = round((time.monotonic() - started) * 1e6)
        proposed = [replace(turn, proposal=proposals.get(turn.slot, turn.proposal)) for turn in turns]
        return [replace(verdict, draft_us=draft_us) for verdict in self._target.step(proposed)]

    def _read(self, turns: Sequence[Turn]) -> None:
        """Let the draft read a long prompt in step with the target, part by part, not all of it at the end."""
        parts = [turn for turn in turns if not turn.chooses and len(turn.token_ids) <= self._proposer.max_length]
        if parts:
            self._proposer.extend([Draft(turn.slot, turn.token_ids, turn.sampling, limit=1) for turn in parts])

    def _draft(self, turns: Sequence[Turn]) -> dict[int, list[int]]:
        """Proposals by slot."""
        chains: dict[int, list[int]] = {turn.slot: [] for turn in turns}
        growing = [turn for turn in turns if self._has_room(turn, chains)]
        while growing:
            drafts = [_draft(turn, chains[turn.slot]) for turn in growing]
            ended = set()
            for turn, token_ids in zip(growing, self._proposer.extend(drafts), strict=True):
                if token_ids is not None:
                    chains[turn.slot].extend(token_ids[: turn.gamma - len(chains[turn.slot])])
                if token_ids == []:
                    ended.add(turn.slot)
            growing = [turn for turn in growing if turn.slot not in ended and self._has_room(turn, chains)]
        return chains

    def _has_room(self, turn: Turn, chains: dict[int, list[int]]) -> bool:
        num_drafted = len(chains[turn.slot])
        return num_drafted < turn.gamma and len(turn.token_ids) + num_drafted <= self._proposer.max_length


def _draft(turn: Turn, chain: list[int]) -> Draft:
    token_ids = [*turn.token_ids, *chain]
    return Draft(turn.slot, token_ids, turn.sampling, turn.gamma - len(chain), turn.output_start)
