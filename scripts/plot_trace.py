"""Chart of a stretch of time from trace files: `python scripts/plot_trace.py OUT.png TITLE=FILE[,FILE] ...`.

Each TITLE is a row of panels: the target's passes and the draft's steps, from files that --trace wrote on one machine.
A pass is labelled with accepted/verified draft tokens.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

SHOWN_MS = 150.0
LANES = {"pass": ("target", "#0072B2"), "step": ("draft", "#E69F00")}


def load(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the steps of all files, sorted by start."""
    events = [event for path in paths for event in json.loads(path.read_text())["traceEvents"]]
    return sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))


def draw(axes: Axes, title: str, events: list[dict[str, Any]]) -> None:
    """Draw passes and draft steps for `SHOWN_MS` after the target's longest pause, where a request begins."""
    origin = _after_longest_pause([event for event in events if event["name"] == "pass"])
    for event in events:
        start_ms, length_ms = (float(event["ts"]) - origin) / 1e3, float(event["dur"]) / 1e3
        if -length_ms < start_ms < SHOWN_MS and event["name"] in LANES:
            _draw_event(axes, event, start_ms, length_ms)
    axes.set(title=title, xlim=(0, SHOWN_MS), ylim=(-0.6, 1.6))
    axes.set_yticks([0, 1], ["draft", "target"])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _after_longest_pause(passes: list[dict[str, Any]]) -> float:
    pauses = [
        (float(later["ts"]) - float(earlier["ts"]) - float(earlier["dur"]), float(later["ts"]))
        for earlier, later in itertools.pairwise(passes)
    ]
    return max(pauses)[1]


def _draw_event(axes: Axes, event: dict[str, Any], start_ms: float, length_ms: float) -> None:
    lane, colour = LANES[event["name"]]
    height = float(lane == "target")
    axes.barh(height, length_ms, left=start_ms, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
    drafted = event["args"].get("draft_tokens")
    if drafted is not None and 0 <= start_ms < SHOWN_MS - length_ms:
        label = f"{event['args']['accepted']}/{drafted}" if drafted else "own"
        axes.text(start_ms + length_ms / 2, height, label, ha="center", va="center", fontsize=7, color="white")


def plot(panels: Sequence[tuple[str, Sequence[Path]]], output: Path) -> None:
    """Draw one panel per (title, trace files), below each other on one time axis."""
    figure, rows = plt.subplots(len(panels), 1, figsize=(11, 1.7 * len(panels)), sharex=True, squeeze=False)
    for axes, (title, files) in zip(rows[:, 0], panels, strict=True):
        draw(axes, title, load(files))
    rows[-1, 0].set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(output, dpi=130)


def main(arguments: list[str]) -> int:
    output, *panels = arguments
    parts = [panel.partition("=") for panel in panels]
    plot([(title, [Path(name) for name in files.split(",")]) for title, _, files in parts], Path(output))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
