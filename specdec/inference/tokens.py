"""Long sequences of tokens that can be sliced, compared and counted without reading all of their tokens each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_PART = 512


class TokenView(Sequence[int]):
    """Sequence that consists of a part of a list, which is not copied, and a few tokens more.

    Slices of it, and sums of it and other tokens, are such views too.

    Args:
        log: list of tokens, which may only grow while views of it exist; so two views of one list need not compare the
            list's tokens.
        start, end: the part of the list from position `start` to before `end`; None as the end: the list's present end.
        tail: tokens that follow this part.
    """

    __slots__ = ("_end", "_log", "_start", "tail")

    def __init__(self, log: Sequence[int], start: int = 0, end: int | None = None, tail: Sequence[int] = ()) -> None:
        self._log = log
        self._start = start
        self._end = len(log) if end is None else end
        self.tail = tail

    def __len__(self) -> int:
        return self._end - self._start + len(self.tail)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> TokenView: ...

    def __getitem__(self, index: int | slice) -> int | TokenView:
        num_logged = self._end - self._start
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"step {step}: a view is of tokens in a row")
            if start == 0 and stop == len(self):
                return self
            first, end = self._start + min(start, num_logged), self._start + min(max(start, stop), num_logged)
            return TokenView(self._log, first, end, self.tail[max(0, start - num_logged) : max(0, stop - num_logged)])
        place = index if index >= 0 else index + len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"token {index} of {len(self)}")
        return self._log[self._start + place] if place < num_logged else self.tail[place - num_logged]

    def __iter__(self) -> Iterator[int]:
        return chain(self._log[self._start : self._end], self.tail)

    def __add__(self, others: Sequence[int]) -> TokenView:
        return TokenView(self._log, self._start, self._end, [*self.tail, *others])


def joined(token_ids: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    """Return `token_ids` followed by `others`: a view if `token_ids` is one, else a new list."""
    return token_ids + others if isinstance(token_ids, TokenView) else [*token_ids, *others]


def logged(token_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Split a `TokenView` into the part that it shares with its list, which never changes, and its tail.

    Of any other sequence, return the sequence itself and an empty tail.
    """
    if not isinstance(token_ids, TokenView):
        return token_ids, ()
    return token_ids[: len(token_ids) - len(token_ids.tail)], token_ids.tail


def has_same_log(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Return whether both sequences are views of the same part of one list, so that only their tails may differ."""
    if not isinstance(ours, TokenView) or not isinstance(theirs, TokenView) or ours._log is not theirs._log:
        return False
    return (ours._start, ours._end) == (theirs._start, theirs._end)


def common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning.

    Of two views of one list, the tokens of that list are not compared.
    """
    start, length = 0, min(len(ours), len(theirs))
    if isinstance(ours, TokenView) and isinstance(theirs, TokenView) and ours._log is theirs._log:
        if has_same_log(ours, theirs):  # a chain and its extension, at each draft token
            return ours._end - ours._start + common_length(ours.tail, theirs.tail)
        start = min(ours._end, theirs._end) - ours._start if ours._start == theirs._start else 0
    for first in range(start, length, _PART):  # parts make a difference cheap to find, and compare at C speed
        end = min(first + _PART, length)
        if (one := [*ours[first:end]]) != (other := [*theirs[first:end]]):
            return first + next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    return length


class Tally:
    """Counter of how often each token occurs in one growing sequence, which reads only the tokens that are new.

    Only one thread at a time may use it.

    Args:
        output_start: position of the sequence's first output token.
    """

    def __init__(self, output_start: int) -> None:
        self._output_start = output_start
        self._num_counted = 0
        self._counts = np.zeros((2, 0), dtype=np.int64)  # [2, largest id + 1]: in prompt, in output

    def count(self, log: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the token ids that occur, ascending, with their counts in the output, and whether the prompt has them.

        Args:
            log: the whole sequence, which begins with the one of the last call.

        Returns:
            Three arrays of the same length: ids, counts (int64), and booleans.
        """
        start, self._num_counted = self._num_counted, 0  # after an error within, all are counted again
        counts = self._counts if start else np.zeros((2, 0), dtype=np.int64)
        token_ids = np.fromiter(log[start:], dtype=np.int64)
        in_output = np.arange(start, len(log)) >= self._output_start
        num_more = 1 + int(token_ids.max(initial=-1)) - counts.shape[1]
        if num_more > 0:
            counts = np.pad(counts, ((0, 0), (0, num_more)))
        np.add.at(counts, (in_output.astype(np.int64), token_ids), 1)
        self._counts, self._num_counted = counts, len(log)
        seen = np.flatnonzero(counts.any(axis=0))
        return seen, counts[1, seen], counts[0, seen] > 0
