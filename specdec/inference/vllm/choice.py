"""Choice of tokens on vLLM's runner V1, by this project's code: bias, penalties, minimum length, truncation and noise.

vLLM has masked what a request's grammar forbids. Runner V2 chooses by itself, and needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.inference.model.decoder import Turn
from specdec.inference.model.slots import Array
from specdec.inference.speculation.grammar import allowed_by_grammar
from specdec.inference.speculation.slot_decoder import choose, rows_not_finite
from specdec.inference.vllm.translation import KEY, chooses, sampling_of


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of logits of one request in a pass: one after its tokens, and one after each token of its proposal.

    Attributes:
        token_ids: the request's tokens so far.
        extra_args: the request's `extra_args` in vLLM.
    """

    token_ids: Sequence[int]
    proposal: Sequence[int]
    extra_args: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Winners:
    """Tokens chosen for the rows of one span; `place` is the span's index in the pass."""

    place: int
    token_ids: Sequence[int]


def names_not_finite(logits: Array, names: Sequence[str], num_rows: Sequence[int]) -> list[str]:
    """Return, for each row of logits that is not finite, the name of the request that it belongs to.

    Args:
        logits: float [sum of num_rows, vocab_size]: the rows of one request after another.
        num_rows: number of rows of each request in `names`.
    """
    if not (broken := rows_not_finite(logits)):
        return []
    owners = [name for name, number in zip(names, num_rows, strict=True) for _ in range(number)]
    return [owners[row] for row in broken]


def winners(spans: Sequence[Span], rows_of: Callable[[Sequence[int]], Array]) -> list[Winners]:
    """Choose a token for each row of the spans whose requests this project samples; vLLM samples the others.

    Args:
        rows_of: returns the logits of the spans at the given indices into `spans`: float [num_rows, vocab_size].
    """
    turns = {place: _turn(span, span.extra_args) for place, span in enumerate(spans) if chooses(span.extra_args)}
    if not turns:
        return []
    chosen = iter(choose(rows_of(list(turns)), [(turn, allowed_by_grammar(turn)) for turn in turns.values()]))
    return [Winners(place, [next(chosen) for _ in (0, *turn.proposal)]) for place, turn in turns.items()]


def _turn(span: Span, extra_args: Any) -> Turn:
    ours = extra_args[KEY]
    sampling, start = sampling_of(ours["sampling"]), ours["output_start"]
    return Turn(0, 0, span.token_ids, sampling, span.proposal, output_start=start)


def crown(logits: Any, winners: Sequence[tuple[int, int]]) -> Any:
    """Force one token in some rows of logits: its logit becomes 0 and all others minus infinity, in place.

    Args:
        logits: float [num_rows, vocab_size].
        winners: (row, token id) of each row to change; all other rows stay as they are.
    """
    if winners:
        rows, token_ids = (list(column) for column in zip(*winners, strict=True))
        logits[rows] = float("-inf")
        logits[rows, token_ids] = 0.0
    return logits
