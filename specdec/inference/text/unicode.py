"""Check of texts for halves of surrogate pairs, which Python's strings can hold, but UTF-8 cannot encode.

They come from JSON, and from bytes on the command line that are not valid UTF-8.
"""

from __future__ import annotations

from specdec.inference.errors import InvalidRequestError


def first_lone_surrogate(text: str) -> int | None:
    """Return the index of the first character that is half of a surrogate pair; None if the text has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def check_unicode(text: str, name: str) -> None:
    """Check that a text has no half of a surrogate pair, which UTF-8, and so protobuf, cannot encode.

    Args:
        name: name of the text in the request, for the error.

    Raises:
        InvalidRequestError: the text has such a half; the message names its index.
    """
    if (place := first_lone_surrogate(text)) is not None:
        raise InvalidRequestError(f"{name}: character {place} is not valid UTF-8", field=name)
