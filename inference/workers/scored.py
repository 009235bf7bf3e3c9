"""Messages that may hold the log-probabilities of a prompt: written within a budget, for peers that may not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from grpc_comm.call import Call
from inference.commit import TokenLogprobs
from inference.errors import CapacityError
from inference.workers.convert import converted

MAX_UNREAD_SCORES = 1_000_000
"""Of all calls together; each takes some 250 bytes, as it came, as a message and as bytes."""
RETRY_AFTER_S = 5.0

_In = TypeVar("_In")


class ScoreWriter:
    """Writes messages of a service, and refuses those whose scores too many others leave unread.

    A prompt of 2000 tokens, with the 20 best of each, is 10 MB that stand until they are read: a call that asked for
    one token holds no slot meanwhile, so that there could be as many as one liked.
    """

    def __init__(self) -> None:
        self._num_unread = 0

    async def write(
        self, call: Call, convert: Callable[[_In], Any], item: _In, scores: Sequence[TokenLogprobs]
    ) -> None:
        """Convert an item and write it; return when the peer has taken it, as far as gRPC can tell.

        Args:
            scores: what the item says of its prompt.

        Raises:
            CapacityError: it has no room. One that is alone always has.
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
