"""A pass's spans (tokens of a slot) are cut into parts that fit compiled shapes; a span's parts have all its tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.backends.pytorch.shapes import Buckets, Shape, Shapes
from specdec.inference.model.slots import Span

NUM_SLOTS, MAX_LENGTH = 5, 90
BUCKETS = Buckets(widths=(1, 2, 6), prompts=(16, 32), batches=(1, 2, 4), shortest=20)
FEW = Buckets(widths=(1, 5), prompts=(8,), shortest=MAX_LENGTH)


@st.composite
def passes(draw: st.DrawFn) -> list[Span]:
    """Draw the spans of a pass: distinct slots, any lengths, and any number of last tokens whose logits are wanted."""
    spans = []
    for slot in draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, NUM_SLOTS))]:
        start = draw(st.integers(0, MAX_LENGTH - 1))
        width = draw(st.one_of(st.integers(1, 7), st.integers(1, 70)).map(lambda w: min(w, MAX_LENGTH - start)))  # noqa: B023
        spans.append(Span(slot, start, range(width), draw(st.sampled_from((0, 1, width // 2, width)))))
    return spans


@pytest.mark.parametrize("buckets", [BUCKETS, FEW])
@given(spans=passes())
def test_parts_are_the_span_and_fit_a_shape(buckets: Buckets, spans: list[Span]) -> None:
    shapes = Shapes(buckets, num_slots=NUM_SLOTS, max_length=MAX_LENGTH)
    made, read, wanted = shapes.all(), dict[int, list[int]](), dict[int, list[int]]()
    for parts in shapes.passes(spans):
        shape = shapes.of(parts)
        assert shape in made
        assert len(parts) <= shape.batch
        assert not shape.is_prompt or parts[0].num_logits <= 1
        for part in parts:
            tokens = list(part.token_ids)
            assert len(tokens) <= shape.width
            assert part.start + len(tokens) <= shape.length
            read.setdefault(part.slot, []).extend(range(part.start, part.start + len(tokens)))
            wanted.setdefault(part.slot, []).extend(tokens[len(tokens) - part.num_logits :])
    for span in spans:
        assert read[span.slot] == list(range(span.start, span.start + len(span.token_ids)))
        assert wanted[span.slot] == list(span.token_ids)[len(span.token_ids) - span.num_logits :]


@pytest.mark.parametrize(("num_slots", "max_length"), [(1, 1), (1, 4), (3, 6), (2, 7), (8, 16)])
def test_small_models_have_small_shapes(num_slots: int, max_length: int) -> None:
    shapes = Shapes(BUCKETS, num_slots=num_slots, max_length=max_length)
    made = shapes.all()
    assert len(set(made)) == len(made)
    assert max(shape.batch for shape in made) == num_slots
    assert max(shape.width for shape in made) <= max_length
    whole = Span(0, 0, range(max_length), 0)
    assert all(shapes.of(parts) in made for parts in shapes.passes([whole]))


def test_the_shapes_are_the_products_of_the_sizes() -> None:
    made = Shapes(FEW, num_slots=4, max_length=64).all()
    assert made == [Shape(4, 1, 64), Shape(4, 5, 64), Shape(1, 8, 64, is_prompt=True)]


def test_prompts_share_the_pass_of_their_ends() -> None:
    shapes = Shapes(FEW, num_slots=4, max_length=64)
    spans = [Span(0, 3, range(18), 1), Span(1, 9, range(1), 1), Span(2, 0, range(8), 1)]
    parts = [[(part.slot, part.start, len(part.token_ids)) for part in each] for each in shapes.passes(spans)]
    assert parts == [[(0, 3, 8)], [(0, 11, 8)], [(2, 0, 8)], [(0, 19, 2), (1, 9, 1)]]
