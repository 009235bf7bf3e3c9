"""Check of the gRPC messages of a server's answer: none may be missing, and there may not be too many.

TCP loses nothing, but proxies have dropped whole HTTP/2 frames. A faulty or hostile server may also send without end.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

from specdec.inference.commit import Commit, Delta, Finished, Started, TextEvent
from specdec.inference.errors import InvalidRequestError, UnavailableError
from specdec.inference.request import DEFAULT_MAX_NEW_TOKENS, NO_DEFAULTS
from specdec.inference.workers.calls.convert import converted

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Output:
    """Check of the events that one server sends as an answer, or as the rest of an answer that another server began.

    Args:
        address: HOST:PORT of the server.
        limit: most tokens of the whole output; None: the server's own default, which its first event names.
        num_committed: number of output tokens that came from other servers before, and count toward `limit`.
    """

    def __init__(self, address: str, *, limit: int | None, num_committed: int = 0) -> None:
        self._address = address
        self._limit = limit
        self._position: int | None = None  # of the next token; Started tells it
        self._num_committed = self._num_taken = num_committed
        self._is_open = limit != 0  # some tokens must come before the end
        self._ended = False

    async def converted(self, convert: Callable[[_In], _Out], item: _In, scores: Sized) -> _Out:
        """Return `convert(item)`, where `item` is a message of the server.

        Args:
            scores: the log-probabilities of a prompt in the message; unless empty, `convert` is called in a thread.

        Raises:
            UnavailableError: the message is not valid or too large, which is the fault of the server.
        """
        try:
            return await converted(convert, item, scores)
        except InvalidRequestError as exc:
            raise self._broken(exc.message) from exc

    def check(self, event: TextEvent) -> None:
        """Check the server's next event, and count its tokens.

        Raises:
            UnavailableError: events or tokens before this one are missing, or more came than were asked for.
        """
        if self._ended:
            raise self._broken("the answer goes on after its end")
        if isinstance(event, Started):
            self._begin(event)
        elif self._position is None:
            raise self._lost("the answer has no beginning")
        elif isinstance(event, Delta):
            self.take(event)
            self._is_open = event.finish_reason is None
        elif self._is_open:
            raise self._lost("the last tokens are missing")
        self._ended = isinstance(event, Finished)

    def _begin(self, started: Started) -> None:
        if self._position is not None:
            raise self._broken("the answer begins twice")
        self._position = started.num_prompt_tokens + self._num_committed
        if self._limit is None:
            self._limit = (started.defaults or NO_DEFAULTS).max_new_tokens or DEFAULT_MAX_NEW_TOKENS

    def take(self, piece: Commit) -> None:
        """Check and count the tokens of the server's next commit (the tokens that became final in one target pass).

        A commit without tokens counts as one token, so that no server can send them without end; but the last one may
        be empty although the limit is reached.

        Raises:
            UnavailableError: tokens before these are missing, there are more than the limit, or the limit is reached
                and the answer does not end.
        """
        if piece.position != self._position:
            raise self._lost(f"tokens of position {piece.position} came where {self._position} is next")
        num_tokens, limit = len(piece.token_ids), self._limit or 0
        is_last = piece.finish_reason is not None
        count = self._num_taken + max(1, num_tokens)
        if count > (limit + (num_tokens == 0) if is_last else limit - 1):
            raise self._broken(f"{count} tokens came{'' if is_last else ' without an end'}, the limit is {limit}")
        self._num_taken = count
        self._position = (self._position or 0) + num_tokens
        if is_last:
            self._limit = min(limit, count)  # nothing may follow

    def check_end(self) -> None:
        """Check that the answer is complete, after the server has ended its stream without an error.

        Raises:
            UnavailableError: the answer has not ended.
        """
        if not self._ended:
            raise self._lost("the answer has no end")

    def _lost(self, message: str) -> UnavailableError:
        return self._broken(f"{message}: something was lost on the way")

    def _broken(self, message: str) -> UnavailableError:
        return UnavailableError(message, address=self._address)
