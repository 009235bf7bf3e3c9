"""Plan of a pass over spans as calls of compiled graphs: a prompt graph, one of K tokens, and one of 1 token.

- The prompt graph reads a span from position 0 and gives logits only of its last token. So it reads up to the first
  token with wanted logits; passes read the rest, such as a proposal after a prompt.
- Passes of K tokens, one committed and K - 1 draft tokens, continue all slots together, after what each slot holds.
  Once no slot has more than one token left to read, a pass of 1 token is enough.
- A long span that starts later, such as a prompt that shares its beginning with the one before, would be many passes.
  The prompt graph reads it from position 0 again, together with what the slot holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.inference.backends.neuron.graphs.calls import Row
from specdec.inference.model.slots import Span

REREAD_PASSES = 4
"""Most passes that continue a prompt after what its slot holds; if more are needed, the whole prompt is read again."""


@dataclass(slots=True)
class Reading:
    """Progress of reading one span.

    Attributes:
        slot: slot of the span.
        token_ids: the whole sequence up to the span's end.
        position: position of the next token to read.
        first_wanted: position of the first token with wanted logits; the end if there is none.
        rows: wanted logits so far, in order of the tokens; the caller appends them.
    """

    slot: int
    token_ids: Sequence[int]
    position: int
    first_wanted: int
    rows: list[object] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Return the position after the span's last token."""
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Return how many tokens are not read yet."""
        return self.end - self.position

    def wants(self, position: int) -> bool:
        """Return whether the span asks for the logits of the token at a position."""
        return position >= self.first_wanted


def takes_few_passes(num_tokens: int, *, width: int) -> bool:
    """Return whether the last `num_tokens` of a prompt are read faster by passes than the whole by the prompt graph.

    Args:
        width: number of tokens of a pass.
    """
    return num_tokens <= REREAD_PASSES * width


def reading(span: Span, held: Sequence[int]) -> Reading:
    """Return the progress of a span of which nothing is read yet; `held` has the tokens that its slot holds.

    Raises:
        ValueError: the span starts after the end of what the slot holds.
    """
    if span.start > len(held):
        raise ValueError(f"slot {span.slot} holds {len(held)} tokens, a span starts at {span.start}")
    token_ids = [*held[: span.start], *span.token_ids]
    return Reading(span.slot, token_ids, span.start, len(token_ids) - span.num_logits)


def prompt_row(work: Reading, *, width: int, max_prompt: int) -> Row | None:
    """Return the row that the prompt graph reads, from position 0; None if passes read the whole span.

    Args:
        width: number of tokens of the widest graph for passes.
        max_prompt: most tokens that the prompt graph reads.
    """
    end = min(work.first_wanted + 1, work.end)
    if work.position > 0 and (takes_few_passes(end - work.position, width=width) or end > max_prompt):
        return None
    return Row(work.slot, 0, work.token_ids[: min(end, max_prompt)])


def next_rows(works: Sequence[Reading], *, width: int, one_width: bool = False) -> tuple[list[Row], int]:
    """Return the rows of the next pass over all spans with tokens left, in the order of slots, and its width.

    Args:
        width: K, the number of tokens of a verification pass; 1 if there is no graph for that.
        one_width: take the graph of K tokens for single ones too: in bfloat16 the two graphs may choose other tokens.
    """
    left = sorted((work for work in works if work.num_left), key=lambda work: work.slot)
    taken = width if one_width or any(work.num_left > 1 for work in left) else 1
    rows = [Row(work.slot, work.position, work.token_ids[work.position : work.position + taken]) for work in left]
    return rows, taken
