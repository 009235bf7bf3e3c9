"""Whether the events of an answer follow one another: a message that was lost on the way must not pass for an answer.

TCP loses nothing, but what stands between two servers may: proxies have dropped whole HTTP/2 frames.
"""

from __future__ import annotations

from inference.commit import Delta, Event, Finished, Started
from inference.errors import UnavailableError


class Continuity:
    """The events of one answer, compared with those before them.

    Args:
        address: HOST:PORT of the server that answers.
        has_tokens: the answer has at least one.
        num_committed: tokens of its output that another server gave.
    """

    def __init__(self, address: str, *, has_tokens: bool, num_committed: int = 0) -> None:
        self._address = address
        self._is_open = has_tokens  # something must come before the end
        self._num_committed = num_committed
        self._position: int | None = None
        self._ended = False

    def check(self, event: Event) -> None:
        """Take the next event.

        Raises:
            UnavailableError: one before it is missing.
        """
        if isinstance(event, Started):
            self._position = event.num_prompt_tokens + self._num_committed
        elif self._position is None:
            raise self._lost("the answer has no beginning")
        elif isinstance(event, Delta):
            self._check_delta(event, self._position)
        elif self._is_open:
            raise self._lost("the last tokens are missing")
        self._ended = isinstance(event, Finished)

    def _check_delta(self, delta: Delta, expected: int) -> None:
        if delta.position not in (None, expected):
            raise self._lost(f"tokens of position {delta.position} came where {expected} is next")
        self._position = expected + len(delta.token_ids)
        self._is_open = delta.position is not None and delta.finish_reason is None

    def check_end(self) -> None:
        """The stream has ended without an error.

        Raises:
            UnavailableError: the answer has not.
        """
        if not self._ended:
            raise self._lost("the answer has no end")

    def _lost(self, message: str) -> UnavailableError:
        return UnavailableError(f"{message}: something was lost on the way", address=self._address)
