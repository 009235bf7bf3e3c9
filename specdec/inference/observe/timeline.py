"""Time-line of one process in Chrome's trace format, for chrome://tracing or Perfetto.

Times are those of CLOCK_MONOTONIC, so the traces of several processes on one machine share a time axis.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specdec.inference.observe.files import write_whole

MAX_EVENTS = 1_000_000
"""Most events kept; a long-lived server stops tracing there."""


class Timeline:
    """Trace events of one process.

    Args:
        name: name of the process in the picture.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": self._pid, "tid": 0, "args": {"name": name}}
        ]

    def span(self, name: str, started: float, ended: float, **args: Any) -> None:
        """Add an event that lasted from `started` to `ended`, in monotonic seconds; `args` are shown with it."""
        if len(self._events) < MAX_EVENTS:
            times = {"ts": started * 1e6, "dur": (ended - started) * 1e6}
            self._events.append({"name": name, "ph": "X", **times, "args": args, "pid": self._pid, "tid": 0})

    def write(self, path: Path) -> None:
        """Write the events that were added so far to a file."""
        write_whole(path, json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}) + "\n")
