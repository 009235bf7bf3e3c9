"""What all pictures look like: colours, marks, lines and hatches, each enough by itself, and conditions below each."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from inference.comparison.plan.config import ComparisonConfig, Series, Topology
from inference.comparison.report.findings import emulation_of, short_conditions
from inference.comparison.report.summary import Spread
from inference.request import Schedule

# Okabe and Ito's colours: told apart with every kind of colour vision, and in black and white by marks, lines and
# hatches.
TARGET, FUSED, POOL = (Series(topology) for topology in (Topology.TARGET, Topology.FUSED, Topology.POOL))
SYNC, ASYNC = (Series(Topology.DISTRIBUTED, schedule) for schedule in (Schedule.SYNC, Schedule.ASYNC))


class Look(NamedTuple):
    """Of a line, and of a bar."""

    colour: str
    mark: str
    line: Any
    hatch: str


_LOOKS = {
    TARGET: Look("#5f5f5f", "s", "-", ""),
    FUSED: Look("#0072B2", "o", (0, (6, 2)), ""),
    SYNC: Look("#D55E00", "^", (0, (2, 1.5)), "//"),
    ASYNC: Look("#009E73", "D", (0, (6, 2, 1.5, 2)), ".."),
    POOL: Look("#CC79A7", "v", ":", "xx"),
}
DRAFTS = (("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"))
"""Colours and marks of lines that are not of topologies."""
_OTHERS = zip(itertools.cycle(DRAFTS[::-1]), itertools.cycle(_LOOKS.values()), itertools.cycle("-\\|o+"), strict=False)


@cache
def look_of(series: Series) -> Look:
    """Endpoints get theirs in turn."""
    if series in _LOOKS:
        return _LOOKS[series]
    draft, known, hatch = next(_OTHERS)
    return Look(*draft, known.line, 2 * hatch)


INCHES_PER_NAME = 1.6
CHARACTERS_PER_INCH = 18
"""Of the conditions' small print."""

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "savefig.dpi": 130,
}


def save(figure: Figure, file: Path, config: ComparisonConfig) -> None:
    """Write a picture that says by itself, without its report, under which conditions it was measured."""
    if label := emulation_of(config):
        figure.suptitle(label, color="#a00000", fontweight="bold", fontsize=10)
    text = textwrap.fill(short_conditions(config), int(figure.get_figwidth() * CHARACTERS_PER_INCH))
    for handles in figure.legends:
        handles.set_title(text)
        handles.get_title().set_fontsize(7)
    figure.savefig(file)


def grid(num_rows: int, num_columns: int, *, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    """A figure of panels that share their y axis."""
    figure = Figure(figsize=(max(5.0, width * num_columns), height * num_rows + 0.7), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    return figure, [list(row) for row in axes]


def from_zero(rows: list[list[Axes]]) -> None:
    """Begin the common y axis at 0. Only when all panels are drawn: it ends the scaling to what they show."""
    rows[0][0].set_ylim(bottom=0)


def errors(spreads: list[Spread]) -> list[list[float]]:
    """Distances below and above the medians, as errorbar wants them."""
    return [[item.median - item.low for item in spreads], [item.high - item.median for item in spreads]]


def legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Below all panels."""
    num_columns = min(5, len(handles), int(figure.get_figwidth() / INCHES_PER_NAME))
    figure.legend(handles=list(handles), loc="outside lower center", ncols=num_columns)


def line_handle(series: Series, **style: Any) -> Line2D:
    """A series in a legend."""
    look = look_of(series)
    return Line2D([], [], color=look.colour, marker=look.mark, label=series.name, **style)


def powers_of_two(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis that names these values alone."""
    axes.set_xscale("log", base=2)
    name_values(axes, values)


def name_values(axes: Axes, values: Sequence[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
