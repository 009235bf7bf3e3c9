"""Shapes of passes: which ones a compiler makes, which one fits given spans, and how longer spans are cut into parts.

Knows neither models nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specdec.inference.model.slots import Span


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one pass.

    Attributes:
        batch: number of spans, padding included.
        width: tokens of each span, padding included.
        length: number of a slot's first positions that attention reads; all spans end within them.
        is_prompt: whether the pass reads a part of a prompt: padding stands before the tokens, and only the last token
            has logits.
    """

    batch: int
    width: int
    length: int
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes from which the shapes of passes are made. With fewer sizes there is less to compile, but more padding.

    Attributes:
        widths: tokens per span in passes over several spans, ascending.
        prompts: tokens in passes over a part of one longer span, ascending and above `widths`.
        batches: spans per pass, ascending; unless `shares_slots`, a pass may also have as many spans as there are
            slots.
        shortest: positions that attention reads in the shortest shapes; others read twice, four times, ... as many.
        shares_slots: whether spans of one pass may belong to the same slot.
    """

    widths: tuple[int, ...]
    prompts: tuple[int, ...]
    batches: tuple[int, ...] = ()
    shortest: int = 512
    shares_slots: bool = False


class Shapes:
    """All shapes that the passes of a model with this number of slots and positions may have.

    Attributes:
        widths: tokens per span in passes over several spans, ascending.
        prompts: tokens in passes over a part of one longer span, ascending.
        batches: spans per pass, ascending.
    """

    def __init__(self, buckets: Buckets, *, num_slots: int, max_length: int) -> None:
        self.widths = _up_to(max_length, buckets.widths)
        self.prompts = [width for width in _up_to(max_length, buckets.prompts) if width > self.widths[-1]]
        self.batches = _up_to(num_slots, buckets.batches if buckets.shares_slots else (*buckets.batches, num_slots))
        lengths = [min(buckets.shortest, max_length)]
        while lengths[-1] < max_length:
            lengths.append(min(2 * lengths[-1], max_length))
        self._lengths = lengths

    def all(self) -> list[Shape]:
        """Return every shape that `of` may return."""
        return [
            shape
            for length in self._lengths
            for shape in (
                *(Shape(batch, width, length) for batch in self.batches for width in self.widths),
                *(Shape(1, width, length, is_prompt=True) for width in self.prompts),
            )
            if self._length(shape.width) <= length
        ]

    def of(self, spans: Sequence[Span]) -> Shape:
        """Return the smallest shape for the spans of one pass, as `passes` yields them."""
        widest = max(len(span.token_ids) for span in spans)
        end = max(span.start + len(span.token_ids) for span in spans)
        is_prompt = widest > self.widths[-1]
        width = _at_least(widest, self.prompts if is_prompt else self.widths)
        batch = 1 if is_prompt else _at_least(len(spans), self.batches)
        return Shape(batch, width, self._length(max(end, width)), is_prompt)

    def passes(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Cut spans into parts that fit a shape; yield the parts of each pass. A slot's earlier positions come first.

        Each part of a long span has a pass of its own. The last pass has the short spans, and what is left of the long
        ones.
        """
        shared = []
        for span in spans:
            *parts, end = self._parts(span)
            yield from ([part] for part in parts)
            if len(end.token_ids) <= self.widths[-1]:
                shared.append(end)
            else:
                yield [end]
        if shared:
            yield shared

    def _parts(self, span: Span) -> Iterator[Span]:
        """Cut a span into parts of the widths of these shapes.

        A pass over a part of a prompt gives logits for its last token alone, so all tokens with wanted logits but the
        first are in narrower parts.
        """
        done, num_tokens, narrow = 0, len(span.token_ids), self.widths[-1]
        num_unwanted = num_tokens - span.num_logits
        while done < num_tokens:
            size = min(num_tokens - done, narrow)
            if size < num_tokens - done and num_unwanted - done >= narrow:
                size = min(num_tokens - done, num_unwanted - done + 1, self.prompts[-1])
            num_logits = max(0, done + size - max(num_unwanted, done))
            token_ids = span.token_ids[done : done + size]
            yield replace(span, start=span.start + done, token_ids=token_ids, num_logits=num_logits)
            done += size

    def _length(self, num_positions: int) -> int:
        return _at_least(num_positions, self._lengths)


def _up_to(limit: int, sizes: Sequence[int]) -> list[int]:
    return sorted({min(size, limit) for size in sizes})


def _at_least(needed: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= needed)
