"""How documents become JSON.

Escaped to ASCII: a reader that takes U+2028 or U+0085 for the end of a line must not cut an event in two, and half of a
surrogate pair in a name must not break the answer that complains about it.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

encoded = json.JSONEncoder(separators=(",", ":")).encode
"""A document as compact JSON."""


class JsonAnswer(JSONResponse):
    """An answer in one piece."""

    def render(self, content: Any) -> bytes:
        """See Starlette's."""
        return encoded(content).encode()
