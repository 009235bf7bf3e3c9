"""Text that can be sent: Python's strings can also hold halves of surrogate pairs, which are no characters.

JSON can write one down, and Python makes them of bytes on the command line that are no UTF-8.
"""

from __future__ import annotations

from inference.errors import InvalidRequestError


def first_lone_surrogate(text: str) -> int | None:
    """Index of the first half of a surrogate pair; None if the text can be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def check_unicode(text: str, name: str) -> None:
    """Refuse text with a lone surrogate, which UTF-8 (and so protobuf) cannot encode.

    Raises:
        InvalidRequestError: naming the place.
    """
    if (place := first_lone_surrogate(text)) is not None:
        raise InvalidRequestError(f"{name}: character {place} is no UTF-8", field=name)
