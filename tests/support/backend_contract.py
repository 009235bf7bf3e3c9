"""Random histories of a backend's slots, and what plain Transformers makes of the same tokens.

Owns the comparison that the correctness tests share: whatever was written, overwritten or rolled back before, a span's
logits are those of a fresh forward over the tokens that the slot is supposed to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from inference.model import Backend, Span
from tests.support.models import DEFAULT_VOCAB_SIZE, tiny_model

NUM_SLOTS = 3
MAX_LENGTH = 24


@dataclass(frozen=True)
class Move:
    """What one slot does in one pass, relative to what it holds: keep a part, then append."""

    slot: int
    keep: float  # part of the held tokens that stays; 1 is plain decoding, 0 is reuse by another sequence
    token_ids: tuple[int, ...]
    wanted: float  # part of the new tokens whose logits are wanted


TOKENS = tuple(range(20, 20 + MAX_LENGTH))

# Prefill, a round of verification on top of it, a rollback into it, and a second sequence beside.
HISTORY = [
    [Move(0, 0, TOKENS[:7], 1), Move(2, 0, TOKENS[3:5], 1)],
    [Move(2, 1, TOKENS[8:13], 1), Move(0, 1, TOKENS[7:8], 1)],
    [Move(0, 0.75, TOKENS[9:13], 1), Move(1, 0, TOKENS[:1], 1)],
]


def moves(slot: int) -> st.SearchStrategy[Move]:
    tokens = st.lists(st.integers(0, DEFAULT_VOCAB_SIZE - 1), min_size=1, max_size=8).map(tuple)
    share = st.one_of(st.sampled_from((0.0, 1.0)), st.floats(0, 1))
    return st.builds(Move, slot=st.just(slot), keep=share, token_ids=tokens, wanted=share)


def passes() -> st.SearchStrategy[list[Move]]:
    """One to all slots in any order."""
    some_slots = st.permutations(range(NUM_SLOTS)).flatmap(
        lambda slots: st.integers(1, NUM_SLOTS).map(lambda count: slots[:count])
    )
    return some_slots.flatmap(lambda slots: st.tuples(*(moves(slot) for slot in slots)).map(list))


histories = st.lists(passes(), min_size=1, max_size=5)


class Reference:
    """Plain Transformers without a cache: one forward over all tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.logits = lru_cache(maxsize=4096)(self._logits)

    def _logits(self, token_ids: tuple[int, ...]) -> np.ndarray[Any, Any]:  # [num_tokens, vocab_size]
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([token_ids]), use_cache=False)
        logits: np.ndarray[Any, Any] = output.logits[0].float().numpy()
        return logits


@lru_cache(maxsize=1)
def reference(family: str) -> Reference:
    return Reference(tiny_model(family))


def assert_matches(
    backend: Backend, plain: Reference, history: Sequence[Sequence[Move]], *, tolerance: float = 1e-4
) -> None:
    """Play a history and compare every logit that it asks for."""
    held: dict[int, tuple[int, ...]] = dict.fromkeys(range(NUM_SLOTS), ())
    for one_pass in history:
        spans = [_span(move, held) for move in one_pass]
        logits = backend.forward(spans)
        expected = [plain.logits(held[span.slot])[len(held[span.slot]) - span.num_logits :] for span in spans]
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, np.concatenate(expected), rtol=0, atol=tolerance)


def _span(move: Move, held: dict[int, tuple[int, ...]]) -> Span:
    """Turn a move into a span that fits, and note what the slot holds after it."""
    token_ids = move.token_ids
    start = min(round(move.keep * len(held[move.slot])), MAX_LENGTH - len(token_ids))
    held[move.slot] = (*held[move.slot][:start], *token_ids)
    return Span(move.slot, start, token_ids, num_logits=round(move.wanted * len(token_ids)))
