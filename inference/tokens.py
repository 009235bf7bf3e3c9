"""Long sequences of tokens, looked at and counted without walking all of them. Imports nothing of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class TokenView(Sequence[int]):
    """Tokens start .. end-1 of a list, and a few behind them; slices and sums are views again, and cost as little.

    Args:
        log: only ever grows while there are views of it, so that two views of one log need not be compared there.
        end: None is the log's present end.
        tail: tokens behind them.
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
                return TokenView([*self][index])
            first, end = (self._start + min(place, num_logged) for place in (start, max(start, stop)))
            return TokenView(self._log, first, end, self.tail[max(0, start - num_logged) : max(0, stop - num_logged)])
        place = index if index >= 0 else index + len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"token {index} of {len(self)}")
        return self._log[self._start + place] if place < num_logged else self.tail[place - num_logged]

    def __iter__(self) -> Iterator[int]:
        return chain(self._log[self._start : self._end], self.tail)

    def __add__(self, others: Sequence[int]) -> TokenView:
        return TokenView(self._log, self._start, self._end, [*self.tail, *others])

    def num_shared(self, other: TokenView) -> int:
        """How many of the first tokens are the same ones of the same log."""
        if self._log is not other._log or self._start != other._start:
            return 0
        return min(self._end, other._end) - self._start


def joined(token_ids: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    """Both in a row."""
    return token_ids + others if isinstance(token_ids, TokenView) else [*token_ids, *others]


def logged(token_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """What of the tokens will never change, and what stands behind it; of tokens that are no view, all."""
    if not isinstance(token_ids, TokenView):
        return token_ids, ()
    return token_ids[: len(token_ids) - len(token_ids.tail)], token_ids.tail


def common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens from the first on are equal."""
    start = ours.num_shared(theirs) if isinstance(ours, TokenView) and isinstance(theirs, TokenView) else 0
    length = min(len(ours), len(theirs))
    if [*ours[start:length]] == [*theirs[start:length]]:  # the usual case, at C speed
        return length
    return next(i for i in range(start, length) if ours[i] != theirs[i])


class Tally:
    """Counts the tokens of one sequence that only grows, each of them once; belongs to one thread at a time.

    Args:
        output_start: position of its first output token.
    """

    def __init__(self, output_start: int) -> None:
        self._output_start = output_start
        self._num_counted = 0
        self._counts = np.zeros(0, dtype=np.int64)  # by token id: in the output
        self._in_prompt = np.zeros(0, dtype=bool)

    def count(self, log: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Ids in the sequence, ascending, how often each is in its output, and whether it is in its prompt."""
        self._take(np.fromiter(log[self._num_counted :], dtype=np.int64))
        seen = np.flatnonzero(self._in_prompt | (self._counts > 0))
        return seen, self._counts[seen], self._in_prompt[seen]

    def _take(self, token_ids: npt.NDArray[np.int64]) -> None:
        num_prompt = max(0, self._output_start - self._num_counted)
        self._num_counted += len(token_ids)
        num_more = 1 + int(token_ids.max(initial=-1)) - len(self._counts)
        if num_more > 0:
            self._counts = np.pad(self._counts, (0, num_more))
            self._in_prompt = np.pad(self._in_prompt, (0, num_more))
        self._in_prompt[token_ids[:num_prompt]] = True
        np.add.at(self._counts, token_ids[num_prompt:], 1)
