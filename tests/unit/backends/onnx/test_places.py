"""Spans (consecutive tokens of one slot) of a pass are grouped into places, each computed by one attention operator.

A place is one span, or the single tokens of several neighbouring slots. Each span is in exactly one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.backends.onnx.places import Place, shared_places, single_places
from specdec.inference.model.slots import Span


def spans(*slots_and_widths: tuple[int, int]) -> list[Span]:
    return [Span(slot, 0, range(width), 1) for slot, width in slots_and_widths]


def slots_of(places: Sequence[Place]) -> list[range]:
    return [place.slots for place in places]


SOME = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), min_size=1, unique_by=lambda pair: pair[0])


@given(SOME, st.sampled_from((0, 3)))
def test_every_span_has_one_place(pairs: list[tuple[int, int]], num_filling: int) -> None:
    some = spans(*pairs)
    places = shared_places(some, num_filling)
    assert sorted(index for place in places for index in place.spans) == list(range(len(some)))
    for place in places:
        assert [some[index].slot for index in place.spans] == list(place.slots)
        filling = num_filling if len(some) - 1 in place.spans else 0
        assert {len(some[index].token_ids) + filling for index in place.spans} == {place.width}
        assert len(place.slots) == 1 or place.width == 1


def test_neighbours_with_single_tokens_share() -> None:
    assert slots_of(shared_places(spans((3, 1), (1, 1), (2, 1), (0, 1)))) == [range(4)]
    assert slots_of(shared_places(spans((3, 1), (1, 1), (2, 1), (5, 1)))) == [range(1, 4), range(5, 6)]
    assert slots_of(shared_places(spans((0, 1), (1, 1), (2, 1), (3, 9)))) == [range(3), range(3, 4)]


def test_places_that_hardly_save_are_single() -> None:
    """Spans share places (attention operators) only if that at least halves the number of places."""
    mixed = spans((0, 1), (1, 1), (2, 3), (3, 3))
    assert shared_places(mixed) == single_places(mixed)
