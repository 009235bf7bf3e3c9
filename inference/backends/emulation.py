"""Passes that take at least so long, asleep: an accelerator's regime on a machine without one.

While a device computes, its host is idle; so a pass sleeps, and others have the cores, until the device would be done.
The tokens are the model's own. Knows not why: `inference.config.Emulation` says how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from inference.model.slots import Array, Span


def asleep(backend: Any, seconds_of: Callable[[Sequence[Span]], float]) -> Any:
    """The same backend, with all that it can do; from now on a pass takes at least `seconds_of` its spans."""
    forward = backend.forward

    def at_least(spans: Sequence[Span]) -> Array:
        end = time.monotonic() + seconds_of(spans)
        logits = forward(spans)
        time.sleep(max(0.0, end - time.monotonic()))
        return logits

    backend.forward = at_least
    return backend
