"""The ids of a resumable stream's events: how far the stream has come, for whichever gateway is asked to go on.

Servers keep nothing for it: an id holds what it takes to make again what was sent, and to see that it is the same.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from inference.gateway.errors import ApiError

HEADER = "last-event-id"
MAX_ID_CHARACTERS = 4096
"""Twice what 128 choices need."""
_VERSION = "1"
_DIGITS = 16
_ID = re.compile(
    rf"{_VERSION}:(?P<model_id>[-\w.~%]+):(?P<seed>[0-9a-f]{{1,16}}):(?P<answer_id>[0-9a-f]{{24}})"
    rf":(?P<created>[0-9a-f]{{1,9}}):(?P<asked>[0-9a-f]{{{_DIGITS}}})"
    rf":(?P<counts>\d{{1,10}}(?:-\d{{1,10}})+):(?P<said>[0-9a-f]{{{_DIGITS}}})",
    re.ASCII,
)


def mismatch(why: str) -> ApiError:
    """Of a stream that cannot be gone on with."""
    message = f"the stream cannot be resumed: {why}; a request without {HEADER} begins anew"
    return ApiError(409, message, param=HEADER, code="resume_mismatch")


@dataclass(frozen=True, slots=True)
class EventId:
    """A place in an answer, behind one of its events.

    Attributes:
        seed: of the first choice.
        answer_id, created: what all chunks of the answer carry, the latter in seconds.
        asked: digest of the request.
        counts: events of each choice up to here, one per token; the last number is of those that belong to none.
        said: digest of them.
        model_id: of who wrote them; empty before the first.
    """

    seed: int
    answer_id: str
    created: int
    asked: str
    counts: tuple[int, ...]
    said: str = ""
    model_id: str = ""

    def __str__(self) -> str:
        facts = (quote(self.model_id, safe=""), f"{self.seed:x}", self.answer_id, f"{self.created:x}", self.asked)
        return ":".join((_VERSION, *facts, "-".join(map(str, self.counts)), self.said))

    def resumed(self, text: str) -> EventId:
        """The place that a client names, where this one is the beginning of what it asks for.

        Raises:
            ApiError: 409: it names none, or one in the answer to another request.
        """
        if len(text) > MAX_ID_CHARACTERS:
            raise mismatch(f"the id has {len(text)} characters, the limit is {MAX_ID_CHARACTERS}")
        if (found := _ID.fullmatch(text)) is None:
            raise mismatch("the id is none that this server gives")
        counts = tuple(map(int, found["counts"].split("-")))
        if found["asked"] != self.asked or len(counts) != len(self.counts):
            raise mismatch("the id belongs to another body, or this server reads the body in another way")
        return EventId(
            int(found["seed"], 16),
            found["answer_id"],
            int(found["created"], 16),
            self.asked,
            counts,
            found["said"],
            unquote(found["model_id"]),
        )


def digest_of(*facts: Any) -> str:
    """16 hex digits of SHA-256 over facts that look the same in every process."""
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
