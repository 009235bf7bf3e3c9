"""The number of draft tokens per round follows from their expected gain, measured times and the number of sessions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.model.decoder import Turn
from specdec.inference.model.proposer import Draft, DraftToken
from specdec.inference.request import SamplingParams
from specdec.inference.scheduling.draft_length import FIRST_LENGTH, Chain, DraftLength
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.support.models import tiny_model

SURE, UNSURE = DraftToken(5, 6, margin=20.0), DraftToken(5, 6, margin=0.05)
STEP_S, PASS_S, SLOPE_S = 0.3e-3, 5e-3, 0.1e-3


def learned(*, step_s: float = STEP_S, num_sessions: int = 1) -> DraftLength:
    """Return a DraftLength after 60 rounds in which `SURE` tokens were always accepted, and `UNSURE` ones never."""
    length = DraftLength()
    for round_number in range(60):
        length.record_step(num_sessions, step_s)
        width = round_number % 40 * num_sessions
        length.record_pass(num_sessions, width, PASS_S + width * SLOPE_S)
        length.record_verdict(0, [SURE] * 4, 4)
        length.record_verdict(1, [UNSURE] * 4, 0)
    return length


def chain_of(slot: int, tokens: Sequence[DraftToken] = (), *, room: int = 64) -> Chain:
    return Chain(Turn(slot, 0, (), SamplingParams()), room, [*tokens])


def growing(length: DraftLength, chains: Sequence[Chain]) -> list[bool]:
    """Return, for each session's chain of draft tokens in a pass, whether the chain should grow further."""
    length.prune(chains, len(chains))
    return [chain.grows for chain in chains]


def is_enough(length: DraftLength, chain: Chain) -> bool:
    """Return whether a session that is alone in its pass should draft nothing after this chain of draft tokens."""
    return growing(length, [chain]) == [False]


def length_of_chain(length: DraftLength, slot: int, token: DraftToken, num_sessions: int = 1) -> int:
    chains = [chain_of(slot) for _ in range(num_sessions)]
    while growing(length, chains)[0]:
        for chain in chains:
            chain.tokens.append(token)
    return len(chains[0].tokens)


def test_drafts_are_short_while_the_times_are_unknown() -> None:
    """Drafts are short until the times of passes are known.

    Regression: two wrong drafts of 16 tokens took 10 % of the time of a short answer.
    """
    assert length_of_chain(DraftLength(), 0, UNSURE) == length_of_chain(DraftLength(), 0, SURE) == FIRST_LENGTH


def test_a_chain_goes_on_across_a_step_that_pays() -> None:
    """A chain of draft tokens grows past a token that costs much time if the tokens after it pay for that.

    Here kernels compute 6 tokens at a time, so a seventh token costs as much as six, and the next five cost nothing.
    """
    length = learned()
    for _ in range(60):
        for width in range(12):
            length.record_pass(1, width, PASS_S if width < 6 else 1.4 * PASS_S)
    assert length_of_chain(length, 0, SURE) >= 11
    assert length_of_chain(length, 0, DraftToken(5, 6, margin=0.8)) <= 5


def test_sure_drafts_go_on_and_unsure_ones_end() -> None:
    length = learned()
    assert length_of_chain(length, 0, SURE) > 12
    assert is_enough(length, chain_of(0, [SURE, UNSURE]))


def test_a_session_whose_draft_is_always_wrong_drafts_nothing() -> None:
    """A session drafts nothing if its draft is always wrong, so that speculation costs it nothing."""
    length = learned()
    assert is_enough(length, chain_of(1))
    length.begin(1)
    assert not is_enough(length, chain_of(1)), "another request has the slot"


def test_a_draft_as_slow_as_its_target_drafts_nothing() -> None:
    assert is_enough(learned(step_s=2 * PASS_S), chain_of(0))


@pytest.mark.parametrize("step_s", [0.1e-3, 0.3e-3, 1e-3])
def test_the_length_is_the_best_one(step_s: float) -> None:
    """If all tokens have equal acceptance, the chosen length gives the most tokens per second."""
    length = learned(step_s=step_s)
    token = DraftToken(5, 6, margin=1.2)
    for _ in range(500):
        for num_accepted in (0, 1, 1, 1, 1):  # 0.8 of what is tested
            length.record_verdict(0, [token], num_accepted)

    def tokens_per_second(gamma: int) -> float:
        return sum(0.8**k for k in range(gamma + 1)) / (PASS_S + gamma * (SLOPE_S + step_s))

    best = max(range(40), key=tokens_per_second)
    chosen = length_of_chain(length, 0, token)
    assert tokens_per_second(chosen) > 0.98 * tokens_per_second(best)


def test_a_growing_chain_is_judged_as_a_whole_one() -> None:
    """Whether a chain of draft tokens is long enough does not depend on whether it grew by tokens or is given whole."""
    length, other, tokens = learned(), learned(), [SURE, DraftToken(5, 6, margin=1.2), SURE, UNSURE, SURE]
    for first in range(len(tokens)):
        chain = chain_of(0)
        for token in tokens[first:]:
            chain.tokens.append(token)
            chain.room = 64
            assert is_enough(length, chain) == is_enough(other, chain_of(0, chain.tokens))


def test_a_sure_chain_goes_on_where_all_others_have_ended() -> None:
    """A chain that is likely to be accepted grows on after the chains of all other sessions in its pass have ended.

    Regression: each chain was judged as if all sessions drafted as many tokens, so of 16 chains the only sure one
    ended early.
    """
    length, token = learned(num_sessions=16), DraftToken(5, 6, margin=1.2)
    for _ in range(2):
        length.record_step(1, STEP_S / 8)
    crowded = length_of_chain(length, 0, token, num_sessions=16)
    assert growing(length, [chain_of(0, [token] * crowded) for _ in range(16)]) == [False] * 16
    ended = [chain_of(1, room=0) for _ in range(15)]
    assert growing(length, [chain_of(0, [token] * crowded), *ended]) == [True] + [False] * 15


def test_several_sessions_have_a_short_pass_before_long_drafts() -> None:
    """Several sessions together have a pass with few draft tokens measured before they draft many.

    Regression: 16 sessions drafted 4, 6 and then 8 tokens each, and the cost of fewer tokens was measured last.
    """
    length = DraftLength()
    for width in (16 * FIRST_LENGTH, 16 * FIRST_LENGTH):
        assert growing(length, [*map(chain_of, range(16))]) == [True] * 16
        length.record_step(16, STEP_S)
        length.record_pass(16, width, PASS_S + width * SLOPE_S)
    for _ in range(2):
        assert growing(length, [*map(chain_of, range(16))]) == [False] * 16
        length.record_pass(16, 0, PASS_S)
    assert growing(length, [*map(chain_of, range(16))]) == [True] * 16


def test_crowded_passes_take_fewer_draft_tokens() -> None:
    """In a pass over many sessions, each session has fewer draft tokens than a session has alone.

    A draft token can gain one token for one session, but delays all 16, so it must be more likely to be accepted.
    """
    alone, crowded = learned(), learned(num_sessions=16)
    unsure = DraftToken(5, 6, margin=0.8)
    assert length_of_chain(crowded, 0, unsure, 16) < length_of_chain(alone, 0, unsure)


LOOKED_UP = DraftToken(5)


def taught(num_sessions: int, num_accepted: int) -> DraftLength:
    """Return a DraftLength of `num_sessions` sessions; `num_accepted` of 8 looked-up tokens were accepted each time."""
    length = learned(num_sessions=num_sessions)
    for _ in range(60):
        length.record_verdict(2, [LOOKED_UP] * 8, num_accepted)
    return length


def test_tokens_of_one_step_are_cut_where_they_stop_to_pay() -> None:
    """All looked-up tokens of a step are verified if such tokens are usually right, none if wrong, else some."""
    assert taught(4, 8).num_worth(2, [LOOKED_UP] * 8, 4) == 8
    assert taught(4, 0).num_worth(2, [LOOKED_UP] * 8, 4) == 0
    half = taught(4, 1).num_worth(2, [LOOKED_UP] * 8, 4), taught(1, 1).num_worth(2, [LOOKED_UP] * 8, 1)
    assert half[0] < half[1], "in a pass of four sessions a token costs each of them more"
    assert DraftLength().num_worth(2, [LOOKED_UP] * 8, 4) == FIRST_LENGTH


class KnownTimes(DraftLength):
    """DraftLength that ignores the times that this machine takes, and has only those that the test records."""

    def record_step(self, num_sessions: int, seconds: float) -> None: ...

    def record_pass(self, num_sessions: int, num_draft_tokens: int, seconds: float) -> None: ...


class WrongLookup:
    """Proposer that gives all of its tokens in one step, as prompt lookup does, all of them wrong."""

    num_slots, max_length, num_branches = 4, 96, 0

    def extend(self, drafts: Sequence[Draft], *, ranked: bool = False) -> list[list[DraftToken] | None]:
        return [[DraftToken(0)] * draft.limit for draft in drafts]


def test_lookups_that_fail_do_not_widen_passes() -> None:
    """Looked-up tokens that are usually rejected do not make passes longer.

    Regression: one step of lookup gives many tokens, so four sessions verified 32 tokens in vain.
    """
    length = KnownTimes()
    for width in range(33):
        for _ in range(2):
            DraftLength.record_pass(length, 4, width, PASS_S + width * 4 * SLOPE_S)
    DraftLength.record_step(length, 4, 1e-5)
    DraftLength.record_step(length, 4, 1e-5)
    target = SlotDecoder(TorchBackend(tiny_model("llama", seed=1), num_slots=4, max_length=96))
    decoder = SpeculativeDecoder(target, WrongLookup(), length)
    sequences, num_drafted = [[5, 6], [8], [9], [7]], 0
    for _ in range(40):
        turns = [Turn(i, 0, tuple(sequence), SamplingParams(), gamma=6) for i, sequence in enumerate(sequences)]
        for sequence, verdict in zip(sequences, decoder.step(turns), strict=True):
            sequence += verdict.token_ids
            num_drafted += verdict.num_draft_tokens
    assert 0 < num_drafted < 40, "of 160 turns"
