"""Translation between the token ids of a target and those of its draft model.

Knows no tokenizer: `specdec.inference.text.vocabulary` makes the maps.

Outside a draft model every id is the target's. If both models have the same tokenizer, their ids are equal, though one
vocabulary may be larger. Otherwise the draft model reads its own tokens for the bytes of each target token, and its
logits are moved to the target's ids, so that draft and target sample with the same random numbers.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from specdec.inference.model.slots import Array
from specdec.inference.tokens import TokenView, common_length, has_same_log, logged


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Map from the ids of a target to those of a draft model; without arguments the ids are equal.

    Attributes:
        num_ids: number of token ids that the target has; draft tokens have lower ids.
        name: names of both tokenizers, so that equal names mean equal maps; empty if the ids are equal.
        columns: int64 [number of the target's ids]: for each, 1 + the draft's id of the token with the same bytes, or 0
            if the draft has no such token.
        own_ids: by target id, the ids of the draft's tokens that write the same bytes; none for a token without a text.
        prefix: ids that the draft model expects before any text.
    """

    num_ids: int = sys.maxsize
    name: str = ""
    columns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), compare=False)
    own_ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict, compare=False)
    prefix: tuple[int, ...] = field(default=(), compare=False)
    _moved: dict[Any, tuple[Array, Array]] = field(default_factory=dict, compare=False)
    """By device: the logit of ids that the draft lacks, and `columns`, both as arrays on that device."""

    @property
    def num_shared(self) -> int | None:
        """Return how many of the target's ids the draft can propose; None if both models have the same ids."""
        return int(np.count_nonzero(self.columns)) if self.name else None

    def read(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the draft's ids for a target's `token_ids`."""
        if not self.name:
            return token_ids
        return [*itertools.chain.from_iterable(map(self.own_ids.__getitem__, token_ids))]

    def carry(self, logits: Array) -> Array:
        """Reorder a draft model's logits to the target's ids; an id that either model lacks gets minus infinity.

        Args:
            logits: float [num_rows, number of the draft's ids].

        Returns:
            float [num_rows, number of the target's ids]; if the ids are equal, float [num_rows, number of the draft's
            ids].
        """
        num_rows, num_own = logits.shape
        if not self.name and self.num_ids >= num_own:
            return logits
        xp, device = array_api_compat.array_namespace(logits), array_api_compat.device(logits)
        if not self.name:
            cut = xp.asarray(logits, copy=True)
            cut[:, self.num_ids :] = -math.inf
            return cut
        if device not in self._moved:
            lacking = xp.full((1, 1), -math.inf, dtype=logits.dtype, device=device)
            self._moved[device] = lacking, xp.asarray(self.columns, device=device)
        lacking, columns = self._moved[device]
        if num_rows > 1:
            lacking = xp.broadcast_to(lacking, (num_rows, 1))
        return xp.take(xp.concat((lacking, logits), axis=-1), columns[: self.num_ids], axis=-1)


SAME_IDS = TokenMap()


class Reading:
    """Translator of one growing sequence of a target to the draft model's token ids; committed tokens only once.

    Attributes:
        token_map: map from the target's ids to the draft model's.
    """

    def __init__(self, token_map: TokenMap = SAME_IDS) -> None:
        self.token_map = token_map
        self._last: Sequence[int] = ()
        self._own: list[int] = []

    def of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the draft model's ids of the sequence; only tokens that are new since the last call are translated.

        Draft tokens at the end, which may change from call to call, are translated each time.
        """
        if not self.token_map.name:
            return token_ids
        if not has_same_log(token_ids, self._last):
            self._read(logged(token_ids)[0], logged(self._last)[0])
        self._last = token_ids
        tail = token_ids.tail if isinstance(token_ids, TokenView) else ()
        return TokenView(self._own, tail=self.token_map.read(tail))

    def _read(self, log: Sequence[int], last: Sequence[int]) -> None:
        num_read = len(last)
        if not num_read or common_length(last, log) < num_read:  # another sequence; views of the last may still exist
            num_read, self._own = 0, [*self.token_map.prefix]
        self._own.extend(self.token_map.read(log[num_read:]))
