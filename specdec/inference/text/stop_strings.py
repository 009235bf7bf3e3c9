"""Search for stop strings in a growing text, which ends before the first one."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.inference.errors import InvalidRequestError
from specdec.inference.text.unicode import check_unicode

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256


def check_stops(stops: Sequence[str]) -> None:
    """Check the number of a request's stop strings, their lengths, and that they are valid UTF-8.

    Raises:
        InvalidRequestError: there are too many, or one is empty, too long or not valid; the message names the limit.
    """
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop has {len(stops)} strings, the limit is {MAX_STOPS}", field="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop has a string of {len(stop)} characters; 1..{MAX_STOP_CHARACTERS} may be", field="stop"
            )
        check_unicode(stop, "stop")


class StopStrings:
    """Filter that passes on a growing text up to the first stop string.

    An end of the text that may be the beginning of a stop string is kept until more text decides it.

    Attributes:
        found: True once a stop string is complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._beginnings = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece of text; return the text that is now certain not to belong to a stop string.

        If a stop string is complete, return the text before it, and set `found`.
        """
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        num_certain = len(text) - self._num_held(text)
        self._held = text[num_certain:]
        return text[:num_certain]

    def rest(self) -> str:
        """Return, at the end of the whole text, what was kept since it might have begun a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that is also the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)
