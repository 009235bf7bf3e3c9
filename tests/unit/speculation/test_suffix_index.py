"""The index of earlier texts finds what an exhaustive search finds, drops tokens when told, and takes little memory."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.speculation.suffix_index import END, LONGEST_MATCH, MAX_STEPS, SuffixIndex

NUM = 3
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=4)


def exhaustive(texts: list[list[int]], last: list[int], first: int = 0) -> int:
    """Return the longest length, 0 or at least NUM, at which the end of `last` is in a text from token `first` on.

    Tokens are counted over all texts, with an END after each text.
    """
    whole = [token for text in texts for token in (*text, END)]
    lengths = [0]
    for place in range(first, len(whole) + 1):
        length = 0
        while length < len(last) and place - length > first and whole[place - 1 - length] == last[-1 - length]:
            length += 1
        lengths.append(length)
    return max(lengths) if max(lengths) >= NUM else 0


@given(TEXTS, st.lists(st.integers(0, 3), min_size=NUM, max_size=LONGEST_MATCH), st.data())
def test_it_finds_the_longest_match(texts: list[list[int]], last: list[int], data: st.DataObject) -> None:
    """The longest match is found, with tokens after it from the same text; tokens that `forget` drops never are."""
    index = SuffixIndex(NUM)
    for text in texts:
        index.append([*text, END])
    whole = [token for text in texts for token in (*text, END)]
    first = data.draw(st.integers(0, len(whole)))
    index.forget(first)
    end, length = index.find(last)
    assert length == exhaustive(texts, last, first)
    assert end - length >= first or not length
    assert whole[end - length : end] == last[len(last) - length :]
    following = index.tokens(end, 5)
    assert following == whole[end : end + 5][: len(following)] if length else True
    assert END not in following
    assert index.tokens(first - 1, 5) == []


def test_a_search_ends_in_a_text_of_one_token() -> None:
    """In any text, a search compares at most `MAX_STEPS` positions."""
    index = SuffixIndex(NUM)
    index.append([*([7] * 5 + [8]) * 2000])
    compared = 0

    class Counted(list[int]):
        def __reversed__(self) -> object:  # type: ignore[override]
            nonlocal compared
            compared += 1
            return iter(self[::-1])

    index.find(Counted([9, 7, 7, 7]))
    assert 0 < compared <= MAX_STEPS


def test_a_token_takes_at_most_forty_bytes() -> None:
    rng = random.Random(1)
    text = [rng.randrange(30_000) for _ in range(30_000)]
    index = SuffixIndex(NUM)
    tracemalloc.start()
    index.append(text)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / len(text) < 40
    assert taken <= index.num_bytes + 10_000
    index.forget(27_000)
    assert index.num_bytes < 0.7 * taken
