"""Text that can be sent: Python's strings can also hold halves of surrogate pairs, which are no characters.

JSON can write one down, and Python makes them of bytes on the command line that are no UTF-8.
"""

from __future__ import annotations

from inference.errors import InvalidRequestError


def check_unicode(text: str, name: str) -> None:
    """Refuse what UTF-8 cannot say, before a message of protobuf does so with a traceback.

    Raises:
        InvalidRequestError: naming the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name}: character {error.start} is no UTF-8") from None
