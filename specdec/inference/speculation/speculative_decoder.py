"""Decoder that drafts with a proposer before each step of a target: both models in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from specdec.inference.model.decoder import Decoder, Turn, Verdict
from specdec.inference.model.proposer import Draft, DraftToken, Proposer
from specdec.inference.model.slots import PrefixKeeper
from specdec.inference.model.token_map import SAME_IDS, TokenMap
from specdec.inference.scheduling.draft_length import Chain, DraftLength
from specdec.inference.speculation.grammar import was_step
from specdec.inference.tokens import joined


class SpeculativeDecoder:
    """Decoder that drafts for every turn without a proposal, then verifies in a step of the target.

    A turn for which nothing was drafted proposes the tokens that prompt lookup found. For attributes see `Decoder`.

    Args:
        target: decoder that verifies the draft tokens.
        proposer: source of the draft tokens; for each slot of the target it has one with the same number.
        length: rule that stops drafting when more tokens would not pay; None: each turn gets `gamma` draft tokens.
        token_map: map from the target's token ids to the draft model's.
    """

    def __init__(
        self,
        target: Decoder,
        proposer: Proposer,
        length: DraftLength | None = None,
        token_map: TokenMap = SAME_IDS,
    ) -> None:
        self._target = target
        self._proposer = proposer
        self._keepers = [each for each in (target, proposer) if isinstance(each, PrefixKeeper)]
        self._length = length
        self._token_map = replace(token_map, num_ids=target.vocab_size)
        self.vocab_size, self.num_slots, self.max_length = target.vocab_size, target.num_slots, target.max_length
        self.prompt_chunk_tokens, self.keeps_grammars = target.prompt_chunk_tokens, target.keeps_grammars
        # See `PrefixKeeper`; the draft's slots follow as far as they can.
        self.slots = target.slots if isinstance(target, PrefixKeeper) else None

    def begin(self, slot: int, source_slot: int, token_ids: Sequence[int]) -> None:
        """Give a slot to a new sequence, as `PrefixKeeper.begin` says, in both models.

        The acceptance rate of draft tokens in the slot is set back to its first estimate.
        """
        if self._length is not None:
            self._length.begin(slot)
        for keeper in self._keepers:
            keeper.begin(slot, source_slot, token_ids)

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Draft up to each turn's gamma tokens in batched steps, then verify the tokens of all turns in one pass."""
        started = time.monotonic()
        self._read(turns)
        chains = self._draft(turns)
        drafted = time.monotonic()
        proposed = [_proposed(turn, chains) for turn in turns]
        verdicts = self._target.step(proposed)
        self._learn(proposed, chains, verdicts, time.monotonic() - drafted)
        if not any(turn.drafts for turn in turns):
            return verdicts
        draft_us = round((drafted - started) * 1e6)
        return [replace(verdict, draft_us=draft_us) for verdict in verdicts]

    def _read(self, turns: Sequence[Turn]) -> None:
        """Let the draft model read a part of a long prompt whenever the target does, not all of it at the end."""
        parts = [
            turn
            for turn in turns
            if turn.drafts and not turn.chooses and len(turn.token_ids) <= self._proposer.max_length
        ]
        if parts:
            self._proposer.extend([_draft(Chain(turn, room=1), self._token_map) for turn in parts])

    def _draft(self, turns: Sequence[Turn]) -> dict[int, list[DraftToken]]:
        """Draft for the turns that may have draft tokens of this decoder; return their chains by slot."""
        drafting = [turn for turn in turns if turn.drafts and turn.chooses and turn.gamma and not turn.proposal]
        chains = [Chain(turn, self._room(turn)) for turn in drafting]
        steps: dict[int, list[float]] = {}  # seconds by number of chains
        while growing := self._growing(chains, len(turns)):
            began = time.monotonic()
            extended = self._extend(growing)
            if was_step(extended):
                steps.setdefault(len(growing), []).append(time.monotonic() - began)
            for chain, tokens in zip(growing, extended, strict=True):
                self._append(chain, tokens, len(turns))
        if self._length is not None:
            for num_chains, seconds in steps.items():
                self._length.record_step(num_chains, statistics.median(seconds))
        return {chain.turn.slot: chain.tokens for chain in chains}

    def _room(self, turn: Turn) -> int:
        """Return the most draft tokens that a turn may have, by its gamma and the longest chain of the proposer."""
        return min(turn.gamma, self._proposer.max_length + 1 - len(turn.token_ids))

    def _growing(self, chains: Sequence[Chain], num_sessions: int) -> list[Chain]:
        """Return the chains that have room and are worth another token; mark the other ones as ended."""
        if self._length is not None:
            self._length.prune(chains, num_sessions)
        return [chain for chain in chains if chain.grows]

    def _extend(self, chains: Sequence[Chain]) -> Sequence[Sequence[DraftToken] | None]:
        """Run one step of the proposer over the chains.

        It also gives the margin of each token's score over that of the second best, if a rule for the length needs it.
        """
        drafts = [_draft(chain, self._token_map) for chain in chains]
        return self._proposer.extend(drafts, ranked=self._length is not None)

    def _append(self, chain: Chain, tokens: Sequence[DraftToken] | None, num_sessions: int) -> None:
        """Append one step's tokens to a chain, as far as there is room and they pay; end it if any is left out.

        Args:
            chain: the chain.
            tokens: what the proposer gave; None if it read a part of a prompt.
            num_sessions: number of sessions in the pass.
        """
        if tokens is None:
            return
        kept = tokens[: chain.turn.gamma - len(chain.tokens)]
        if self._length is not None and len(kept) > 1 and not kept[0].is_forced:
            kept = kept[: self._length.num_worth(chain.turn.slot, kept, num_sessions)]
        chain.tokens.extend(kept)
        if len(kept) < max(1, len(tokens)):
            chain.room = 0

    def _learn(
        self, turns: Sequence[Turn], chains: dict[int, list[DraftToken]], verdicts: Sequence[Verdict], seconds: float
    ) -> None:
        if self._length is None:
            return
        for turn, verdict in zip(turns, verdicts, strict=True):
            if turn.slot in chains:
                self._length.record_verdict(turn.slot, chains[turn.slot], verdict.of_draft[1])
        if all(turn.num_unread == 1 for turn in turns):  # reading a prompt shows nothing about drafts
            self._length.record_pass(len(turns), sum(verdict.num_draft_tokens for verdict in verdicts), seconds)


def _proposed(turn: Turn, chains: dict[int, list[DraftToken]]) -> Turn:
    if turn.slot not in chains:
        return turn
    return replace(turn, proposal=[token.token_id for token in chains[turn.slot]])


def _draft(chain: Chain, token_map: TokenMap) -> Draft:
    turn = chain.turn
    token_ids = joined(turn.token_ids, [token.token_id for token in chain.tokens])
    limit = turn.gamma - len(chain.tokens)
    more = turn.output_start, None, turn.grammar, turn.tally, token_map
    return Draft(turn.slot, token_ids, turn.sampling, limit, *more)
