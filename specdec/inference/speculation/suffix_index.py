"""Index of texts of tokens, which finds the longest earlier occurrence of a sequence's last tokens.

Places before which the tokens have the same hash are linked to a chain, the latest first, as in the LZ77 search of
zlib. A text takes 16 to 24 bytes a token: its id, the distance to the previous place of its chain, and the heads of the
chains. A node of a suffix tree or automaton, which others use for this (SuffixDecoding, arXiv 2411.04975), takes some
hundred bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

LONGEST_MATCH = 16
"""Longest match that is measured, in tokens; longer ones count as this long."""
MAX_STEPS = 32
"""Most places with the same hash that one search compares, so that no text makes a search slow."""
END = -1
"""Mark of the end of a text: it equals no token, so no match and no continuation goes beyond it."""
_FEWEST_HEADS = 64


class SuffixIndex:
    """Index of texts in a row; texts are added at its end, and dropped from its beginning.

    A place in the row is given by the number of tokens before it, dropped ones included.

    Args:
        num: shortest match that is found, in tokens.

    Attributes:
        first: place of the first token that is not dropped.
    """

    def __init__(self, num: int) -> None:
        self._num, self.first = num, 0
        self._base = 0  # place of the arrays' first element; between it and `first` are forgotten tokens
        self._token_ids, self._back = array("i"), array("I")
        self._heads = array("q", [0]) * _FEWEST_HEADS  # places after the latest tokens of each hash

    @property
    def end(self) -> int:
        """Return the place after the last token."""
        return self._base + len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the index, in bytes."""
        return sum(map(sys.getsizeof, (self._token_ids, self._back, self._heads)))

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end; put an `END` after each text."""
        ids, num, place = self._token_ids, self._num, self.end
        while len(ids) + len(token_ids) > 2 * len(self._heads):
            self._heads *= 2  # each chain is the old part of two
        heads, mask = self._heads, len(self._heads) - 1
        for each in token_ids:
            ids.append(each)
            place += 1
            bucket = hash(tuple(ids[-num:])) & mask
            self._back.append(min(place - heads[bucket], 2**32 - 1))
            heads[bucket] = place

    def find(self, last: Sequence[int], near: int | None = None) -> tuple[int, int]:
        """Find the longest occurrence of a sequence's last tokens.

        Args:
            last: the sequence's last tokens, of which at least `num` must match.
            near: of equally long matches, the one nearest to this place is taken; None: the latest.

        Returns:
            The place after the match, and the match's length in tokens; (0, 0) if there is none.
        """
        near, length, end = self.end if near is None else near, 0, 0
        place = self._heads[hash(tuple(last[-self._num :])) & (len(self._heads) - 1)]
        for _ in range(MAX_STEPS):
            if place <= self.first:
                break
            same = self._same(place, last)
            if same > length or (same == length and abs(place - near) < abs(end - near)):
                length, end = same, place
            if same == len(last) and place <= near:  # those before are no longer, and farther away
                break
            place -= self._back[place - 1 - self._base]
        return (end, length) if length >= self._num else (0, 0)

    def _same(self, place: int, last: Sequence[int]) -> int:
        """Return how many of a sequence's last tokens, counted from its end, stand right before a place."""
        start = place - self._base
        before = self._token_ids[max(self.first - self._base, start - len(last)) : start]
        pairs = zip(reversed(before), reversed(last), strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(before), len(last)))

    def tokens(self, place: int, limit: int) -> list[int]:
        """Return up to `limit` tokens from a place to the end of its text; none if the token there was dropped."""
        start = place - self._base
        piece = self._token_ids[start : start + limit].tolist() if place >= self.first else []
        return piece[: piece.index(END)] if END in piece else piece

    def forget(self, place: int) -> None:
        """Drop the tokens before a place, which are then no longer found.

        Their memory is freed once they are an eighth of all.
        """
        self.first = place
        if (num_forgotten := place - self._base) * 8 >= len(self._token_ids):
            del self._token_ids[:num_forgotten], self._back[:num_forgotten]
            self._base = place
