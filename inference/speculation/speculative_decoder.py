"""Decoder with a proposer in front of it: the fused topology."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from inference.model.decoder import Decoder, Turn, Verdict
from inference.model.proposer import Draft, DraftToken, Proposer
from inference.model.slots import PrefixKeeper
from inference.scheduling.draft_length import DraftLength
from inference.speculation.grammar import was_step
from inference.tokens import joined


class SpeculativeDecoder:
    """Decoder that drafts for every turn without a proposal, then takes the target's step.

    A turn that still has no draft tokens proposes what was looked up.

    Args:
        target: decoder that verifies.
        proposer: source of drafts; it has a slot for each of the target's, under the same number.
        length: decides when more draft tokens would not pay; without it, gamma tokens are drafted every time.
    """

    def __init__(self, target: Decoder, proposer: Proposer, length: DraftLength | None = None) -> None:
        self._target = target
        self._proposer = proposer
        self._keepers = [each for each in (target, proposer) if isinstance(each, PrefixKeeper)]
        self._length = length
        self.vocab_size, self.num_slots, self.max_length = target.vocab_size, target.num_slots, target.max_length
        self.prompt_chunk_tokens, self.keeps_grammars = target.prompt_chunk_tokens, target.keeps_grammars
        # See `PrefixKeeper`; the draft's slots follow as far as they can.
        self.slots = target.slots if isinstance(target, PrefixKeeper) else None

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """See `PrefixKeeper`; what was learned from the slot's last sequence is reset."""
        if self._length is not None:
            self._length.begin(slot)
        for keeper in self._keepers:
            keeper.begin(slot, source_slot, token_ids)

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Draft up to each turn's gamma in batched steps, then verify all in one pass."""
        started = time.monotonic()
        self._read(turns)
        chains = self._draft(turns)
        drafted = time.monotonic()
        proposed = [_proposed(turn, chains) for turn in turns]
        verdicts = self._target.step(proposed)
        self._learn(proposed, chains, verdicts, time.monotonic() - drafted)
        draft_us = round((drafted - started) * 1e6)
        return [replace(verdict, draft_us=draft_us) for verdict in verdicts]

    def _read(self, turns: Sequence[Turn]) -> None:
        """Let the draft read each part of a long prompt with the target, instead of the whole prompt at the end."""
        parts = [turn for turn in turns if not turn.chooses and len(turn.token_ids) <= self._proposer.max_length]
        if parts:
            self._proposer.extend([Draft(turn.slot, turn.token_ids, turn.sampling, limit=1) for turn in parts])

    def _draft(self, turns: Sequence[Turn]) -> dict[int, list[DraftToken]]:
        """Return the chains of the turns that may draft, by slot; all turns share the pass, and so its time."""
        drafting = [turn for turn in turns if turn.chooses and turn.gamma and not turn.proposal]
        chains: dict[int, list[DraftToken]] = {turn.slot: [] for turn in drafting}
        growing = self._growing(drafting, chains, len(turns))
        while growing:
            ended = set()
            for turn, tokens in zip(growing, self._extend(growing, chains), strict=True):
                kept = self._worth(turn, chains[turn.slot], tokens or [], len(turns))
                chains[turn.slot].extend(kept)
                if tokens is not None and len(kept) < max(1, len(tokens)):
                    ended.add(turn.slot)
            growing = self._growing([turn for turn in growing if turn.slot not in ended], chains, len(turns))
        return chains

    def _growing(self, turns: Sequence[Turn], chains: dict[int, list[DraftToken]], num_sessions: int) -> list[Turn]:
        """Return the turns with chains that have room, and are worth another token."""
        return [
            turn
            for turn in turns
            if self._has_room(turn, len(chains[turn.slot]))
            and (self._length is None or not self._length.is_enough(turn.slot, chains[turn.slot], num_sessions))
        ]

    def _has_room(self, turn: Turn, num_drafted: int) -> bool:
        return num_drafted < turn.gamma and len(turn.token_ids) + num_drafted <= self._proposer.max_length

    def _worth(
        self, turn: Turn, chain: Sequence[DraftToken], tokens: Sequence[DraftToken], num_sessions: int
    ) -> Sequence[DraftToken]:
        """Return the tokens of one step that have room, and of a lookup's those that pay."""
        tokens = tokens[: turn.gamma - len(chain)]
        if self._length is None or len(tokens) < 2 or tokens[0].is_forced:
            return tokens
        return tokens[: self._length.num_worth(turn.slot, tokens, num_sessions)]

    def _extend(
        self, turns: Sequence[Turn], chains: dict[int, list[DraftToken]]
    ) -> Sequence[Sequence[DraftToken] | None]:
        """Run one step of the proposer, with margins where they are of use."""
        drafts = [_draft(turn, chains[turn.slot], self.vocab_size) for turn in turns]
        started = time.monotonic()
        extended = self._proposer.extend(drafts, ranked=self._length is not None)
        if self._length is not None and was_step(extended):
            self._length.record_step(len(turns), time.monotonic() - started)
        return extended

    def _learn(
        self, turns: Sequence[Turn], chains: dict[int, list[DraftToken]], verdicts: Sequence[Verdict], seconds: float
    ) -> None:
        if self._length is None:
            return
        for turn, verdict in zip(turns, verdicts, strict=True):
            if turn.slot in chains:
                self._length.record_verdict(turn.slot, chains[turn.slot], verdict.of_draft[1])
        if all(len(turn.token_ids) - turn.start == 1 for turn in turns):  # reading a prompt shows nothing about drafts
            self._length.record_pass(len(turns), sum(verdict.num_draft_tokens for verdict in verdicts), seconds)


def _proposed(turn: Turn, chains: dict[int, list[DraftToken]]) -> Turn:
    if turn.slot not in chains:
        return turn
    return replace(turn, proposal=[token.token_id for token in chains[turn.slot]])


def _draft(turn: Turn, chain: Sequence[DraftToken], vocab_size: int) -> Draft:
    token_ids = joined(turn.token_ids, [token.token_id for token in chain])
    limit = turn.gamma - len(chain)
    more = turn.output_start, None, turn.grammar, turn.tally, vocab_size
    return Draft(turn.slot, token_ids, turn.sampling, limit, *more)
