"""Memory that runs out at any point of some code, injected by a trace function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def strikes(call: Callable[[], object], number: int, within: str) -> bool:
    """Run `call`, with a MemoryError at one point of it; return whether it got that far, and failed.

    Args:
        number: number of the point, from 1 on, in the order in which lines run: the error comes before the line.
        within: beginning of the names of the modules that count.
    """
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not str(frame.f_globals.get("__name__")).startswith(within):
            return None
        left -= event == "line"
        if not left:
            left = -1  # once
            raise MemoryError(f"injected at line {frame.f_lineno} of {frame.f_code.co_filename}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except MemoryError:
        return True
    finally:
        sys.settrace(before)
    return False
