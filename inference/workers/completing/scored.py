"""Writer of messages with a prompt's log-probabilities ("scores"), which limits the memory of those not yet read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from grpc_comm.call import Call
from inference.commit import TokenLogprobs
from inference.errors import CapacityError
from inference.workers.calls.convert import converted

MAX_UNREAD_SCORES = 1_000_000
"""Limit of unread scores of all calls together. One takes about 250 bytes, as object, message and bytes."""
RETRY_AFTER_S = 5.0

_In = TypeVar("_In")


class ScoreWriter:
    """Writer of a service's messages, which refuses new scores while peers have too many others unread.

    A prompt of 2000 tokens, with the 20 best of each, takes 10 MB until the peer has read them. A call that asked for
    one token holds no slot meanwhile, so slots do not limit the number of such calls.
    """

    def __init__(self) -> None:
        self._num_unread = 0

    async def write(
        self, call: Call, convert: Callable[[_In], Any], item: _In, scores: Sequence[TokenLogprobs]
    ) -> None:
        """Convert an item and write it; return when the peer has taken it, as far as gRPC knows.

        Args:
            scores: the prompt's scores in the item.

        Raises:
            CapacityError: the budget has no room for the scores. A call that is alone always has room.
        """
        if not scores:
            return await call.write(convert(item))
        num_scores = sum(len(each.token_ids) for each in scores)
        if self._num_unread and self._num_unread + num_scores > MAX_UNREAD_SCORES:
            message = f"prompt_logprobs: {self._num_unread} of this server wait to be read (limit {MAX_UNREAD_SCORES})"
            raise CapacityError(message, retry_after_s=RETRY_AFTER_S)
        self._num_unread += num_scores
        try:
            await call.write(await converted(convert, item, scores))
        finally:
            self._num_unread -= num_scores
