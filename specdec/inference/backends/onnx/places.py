"""Places of a pass: groups of sequences that share one attention operator of the graph. Knows no graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.inference.model.slots import Span


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class Place:
    """Part of a pass with an attention operator of its own: a span, or single tokens of neighbouring slots (a run).

    Attributes:
        slots: slots of these sequences.
        spans: indices of their spans in the pass.
        width: tokens per span; if this is more than the span has, padding fills the rest.
    """

    slots: range
    spans: Sequence[int]
    width: int


def single_places(spans: Sequence[Span], num_filling: int = 0) -> list[Place]:
    """Return one `Place` per span; the last one ends with `num_filling` tokens of padding."""
    places = [Place(range(span.slot, span.slot + 1), (index,), len(span.token_ids)) for index, span in enumerate(spans)]
    if num_filling:
        last = places[-1]
        places[-1] = Place(last.slots, last.spans, last.width + num_filling)
    return places


def shared_places(spans: Sequence[Span], num_filling: int = 0) -> list[Place]:
    """Return places in which single tokens of neighbouring slots are together, if that halves the number of places.

    Otherwise return one place per span: sequences that verify in some passes and decode in others would change the runs
    from pass to pass, and binding a place to other slots takes as long as several operators.

    Args:
        num_filling: tokens of padding after those of the last span.
    """
    singles = single_places(spans, num_filling)
    runs: list[list[Place]] = []
    for place in sorted(singles, key=lambda place: place.slots.start):
        last = runs[-1][-1] if runs else place
        if last.width == place.width == 1 and last.slots.stop == place.slots.start:
            runs[-1].append(place)
        else:
            runs.append([place])
    return [_joined(run) for run in runs] if 2 * len(runs) <= len(spans) else singles


def _joined(run: Sequence[Place]) -> Place:
    slots = range(run[0].slots.start, run[-1].slots.stop)
    return Place(slots, [index for place in run for index in place.spans], run[0].width)
