"""Picture of a study: the speed-up of each topology at its best settings, with a panel per condition."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.comparison.plan.config import ComparisonConfig
from specdec.comparison.report.chart_style import (
    DRAFTS,
    STYLE,
    TARGET,
    look_of,
    median_line,
    name_values,
    panels,
    powers_of_two,
    save,
)
from specdec.comparison.report.plots import Drawn
from specdec.comparison.study.advice import Evidence, crossovers

_NUMBERS = {
    "gamma": "gamma (draft tokens of a round)",
    "max_new_tokens": "output tokens of a request",
    "rtt_ms": "round trip (ms)",
    "temperature": "temperature",
    "concurrency": "requests in flight",
}
_LOGARITHMIC = ("gamma", "max_new_tokens", "concurrency")
MOST_COLUMNS = 3
"""Most panels side by side: a page would shrink the text of wider pictures."""


def draw(evidence: Evidence, config: ComparisonConfig, file: Path) -> list[Drawn]:
    """Write the picture into `file`; return it in a list, which is empty if no condition has more than one value."""
    names = [name for name in _NUMBERS if any(len(evidence.over(name, it.contender)) > 1 for it in evidence.leaders)]
    if names:
        with mpl.rc_context(STYLE):
            save(over_conditions(evidence, names), file, config)
    shown = f"Lines over {', '.join(_NUMBERS[name] for name in names)}; the figures are in the table of trials."
    return [Drawn(file, "Speed-up of every way at its best", shown)] if names else []


def over_conditions(evidence: Evidence, names: list[str]) -> Figure:
    """Draw a panel per condition, and in it a line per topology with its schedule, at its best settings.

    A dotted line marks a load at which the speed-up of a topology crosses 1.

    Args:
        names: keys of `_NUMBERS` that have a panel: names of conditions, and "gamma".
    """
    rows = [names[start : start + MOST_COLUMNS] for start in range(0, len(names), MOST_COLUMNS)]
    places = range(min(len(names), MOST_COLUMNS))
    size = 3.6, 2.9 + 0.2 * len(evidence.leaders) / len(rows)
    texts = ["speed-up over the target alone"] * len(rows), [""] * len(places)
    return panels(rows, places, partial(_place, evidence), size=size, names=texts, max_legend_columns=1)


def _place(evidence: Evidence, axes: Axes, row: list[str], column: int) -> None:
    """Draw one panel of the picture, or hide it: the last row may have fewer conditions than there are columns.

    Args:
        row: names of the conditions that one row of the picture shows, one in each panel.
        column: number of the panel in this row, from 0.
    """
    if column < len(row):
        _panel(axes, evidence, row[column])
    else:
        axes.set_visible(False)


def _panel(axes: Axes, evidence: Evidence, name: str) -> None:
    lines = {trial.contender.label: evidence.over(name, trial.contender) for trial in evidence.leaders}
    for (label, trials), (colour, mark) in zip(lines.items(), itertools.cycle(DRAFTS), strict=False):
        spreads = [trial.speedup for trial in trials.values()]
        median_line(axes, list(trials), spreads, color=colour, marker=mark, label=label)
        for crossed in crossovers(trials) if name == "concurrency" else ():
            axes.axvline(crossed, color=colour, linestyle=":", linewidth=1.2)
            axes.plot([], [], color="black", linestyle=":", label="this colour is as fast as the target alone")
    axes.set_title(_NUMBERS[name])
    axes.axhline(1.0, color=look_of(TARGET).colour, linewidth=1.2)
    show = powers_of_two if name in _LOGARITHMIC else name_values
    show(axes, sorted({at for trials in lines.values() for at in trials}))
