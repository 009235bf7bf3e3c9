"""Shapes of passes: the few that a compiler makes, the one that fits some spans, and the parts of spans that fit none.

Pure; knows neither models nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specdec.inference.model.slots import Span


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one pass.

    Attributes:
        batch: number of spans; if it is the number of all slots, row i of the pass is slot i, unless spans share slots.
        width: tokens of each span, padding included.
        length: positions that attention reads; no span ends after them.
        is_prompt: whether the tokens are a part of a prompt: they stand at the right, and only the last has logits.
    """

    batch: int
    width: int
    length: int
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes to choose shapes from. Fewer sizes are compiled sooner, but passes carry more padding.

    Attributes:
        widths: tokens per span in passes that several spans may share, ascending.
        prompts: tokens of passes that read a part of one wider span alone, ascending and above `widths`.
        batches: spans per pass, ascending; unless `shares_slots`, a pass may also have as many spans as slots.
        shortest: positions that attention reads in the shortest shapes; others read twice, four times, ... as many.
        shares_slots: whether spans of a pass may belong to the same slot.
    """

    widths: tuple[int, ...]
    prompts: tuple[int, ...]
    batches: tuple[int, ...] = ()
    shortest: int = 512
    shares_slots: bool = False


class Shapes:
    """All shapes of a model with a number of slots and positions, and the cutting of passes into them."""

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
        """Yield the spans of each pass. A slot's earlier positions are in earlier passes.

        The parts of wide spans come first, each alone; narrow spans and the narrow ends of wide ones share the last.
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
        """Cut a span into parts that fit the widths of these shapes.

        A prompt part gives logits for its last row only, so tokens with wanted logits go in others.
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
