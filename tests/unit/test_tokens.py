"""A TokenView, which is a part of a list of tokens without a copy, equals that part after any operations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.tokens import TokenView, common_length, joined, logged

TOKENS = st.lists(st.integers(0, 2), max_size=8)
PLACES = st.one_of(st.none(), st.integers(-12, 12))
CUTS = st.lists(st.tuples(PLACES, PLACES, TOKENS), max_size=4)


def cut(view: TokenView, plain: list[int], steps: list[tuple[int | None, int | None, list[int]]]) -> TokenView:
    """Apply slices and appended tokens to a view, and to the list `plain` in place; return the changed view."""
    for start, stop, more in steps:
        view, plain[:] = view[start:stop] + more, [*plain[start:stop], *more]
    return view


@given(TOKENS, TOKENS, CUTS)
def test_a_view_is_the_list_that_it_stands_for(log: list[int], tail: list[int], steps: list[object]) -> None:
    plain = [*log, *tail]
    view = cut(TokenView(log, tail=tail), plain, steps)  # type: ignore[arg-type]
    assert [*view] == plain
    assert [view[i] for i in range(-len(view), len(view))] == [*plain, *plain]
    stable, drafts = logged(view)
    assert [*stable, *drafts] == plain
    assert [*joined(view, [7])] == [*joined(plain, [7])] == [*plain, 7]


@given(TOKENS, TOKENS, TOKENS, TOKENS, CUTS)
def test_views_are_compared_as_lists_are(
    log: list[int], grown: list[int], one_tail: list[int], other_tail: list[int], steps: list[object]
) -> None:
    """The common beginning of two views is as long as the common beginning of the lists that they stand for."""
    one = TokenView(log, end=len(log), tail=one_tail)
    plain = [*one]
    log += grown
    other = TokenView(log, tail=other_tail)
    expected = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
    expected = min(len(plain), len(other)) if expected is None else expected
    assert common_length(one, other) == common_length(plain, [*other]) == common_length(plain, other) == expected
    both = [*plain], [*other]
    views = [cut(view, lists, steps) for view, lists in zip((one, other), both, strict=True)]  # type: ignore[arg-type]
    assert common_length(*views) == common_length(*both)


@given(TOKENS, TOKENS, TOKENS)
def test_chains_after_the_same_tokens_share_them(log: list[int], one: list[int], other: list[int]) -> None:
    views = TokenView(log, tail=one), TokenView(log, tail=other)
    assert common_length(*views) == common_length([*log, *one], [*log, *other])
