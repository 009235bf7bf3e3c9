"""Style of all charts: colour, mark, dashes and hatch of each line or bar, and a caption with the conditions."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from specdec.comparison.plan.config import ComparisonConfig, Contender, Topology
from specdec.comparison.report.findings import emulation_of, short_conditions
from specdec.comparison.report.summary import Spread
from specdec.inference.request import Schedule

RowT = TypeVar("RowT")
ColumnT = TypeVar("ColumnT")

# Okabe and Ito's colours are distinct with every kind of colour vision; marks, lines and hatches in black and white.
TARGET, FUSED, POOL = (Contender(topology) for topology in (Topology.TARGET, Topology.FUSED, Topology.POOL))
SYNC, ASYNC = (Contender(Topology.DISTRIBUTED, schedule=schedule) for schedule in (Schedule.SYNC, Schedule.ASYNC))


class Look(NamedTuple):
    """Colour, mark and dashes (`line`) of lines, and hatch of bars, for one way to serve, as matplotlib takes them."""

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
"""Colours and marks of lines that do not stand for topologies."""
_OTHERS = zip(itertools.cycle(DRAFTS[::-1]), itertools.cycle(_LOOKS.values()), itertools.cycle("-\\|o+"), strict=False)


@cache
def look_of(series: Contender) -> Look:
    """Return the look of a series (a topology with its schedule, or an endpoint).

    An endpoint has no fixed look: it gets the next free one, and keeps it.
    """
    if series in _LOOKS:
        return _LOOKS[series]
    draft, known, hatch = next(_OTHERS)
    return Look(*draft, known.line, 2 * hatch)


BOUND = "bound (dashes)"
INCHES_PER_NAME = 1.6
CHARACTERS_PER_INCH = 18
"""Number of characters per inch of width in the small print below a chart, which states the conditions."""

TITLE_PER_INCH = 11.6
"""Number of characters per inch of width in the title that says that a chart's figures are emulated."""
BUSY = "busy or unsteady machine"

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


def save(figure: Figure, file: Path, config: ComparisonConfig, *, is_busy: bool = False) -> None:
    """Write a picture with the measurement's conditions in it, so that it can be read without its report.

    Args:
        config: configuration of the comparison that was measured.
        is_busy: whether its figures are unreliable, because the machine was busy or unsteady.
    """
    if label := emulation_of(config):
        title = textwrap.fill(label, int(figure.get_figwidth() * TITLE_PER_INCH), break_on_hyphens=False)
        figure.suptitle(title, color="#a00000", fontweight="bold", fontsize=10)
    conditions = short_conditions(config) + (f". {BUSY.capitalize()}: repeat this on a quiet one" if is_busy else "")
    text = textwrap.fill(conditions, int(figure.get_figwidth() * CHARACTERS_PER_INCH))
    for handles in figure.legends:
        handles.set_title(text)
        handles.get_title().set_fontsize(7)
    figure.savefig(file)


def panels(
    rows: Sequence[RowT],
    columns: Sequence[ColumnT],
    draw: Callable[[Axes, RowT, ColumnT], None],
    *,
    size: tuple[float, float],
    names: tuple[Sequence[str], Sequence[str]],
    max_legend_columns: int = 6,
) -> Figure:
    """Return a figure of panels in rows and columns, with a common y axis from 0 and a legend of all labels below.

    A panel has no title if the one above has the same.

    Args:
        draw: function that fills the panel of a row and a column.
        size: width and height of a panel, in inches.
        names: names of the y axis by row, and of the x axis by column.
    """
    figsize = max(5.0, size[0] * len(columns)), size[1] * len(rows) + 0.7
    figure = Figure(figsize=figsize, layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    shown: dict[str, Artist] = {}
    for axes, place in zip(grid.flat, itertools.product(rows, columns), strict=True):
        draw(axes, *place)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    for axes, text in zip(grid[:, 0], names[0], strict=True):
        axes.set_ylabel(text)
    for axes, text in zip(grid[-1], names[1], strict=True):
        axes.set_xlabel(text)
    grid[0, 0].set_ylim(bottom=0)  # last, since it ends the automatic scaling
    for axes, above in zip(grid[:0:-1].flat, grid[-2::-1].flat, strict=True):
        axes.set_title("" if axes.get_title() == above.get_title() else axes.get_title())
    most = min(max_legend_columns, int(figsize[0] / INCHES_PER_NAME))
    num_columns = math.ceil(len(shown) / math.ceil(len(shown) / most))  # equal rows
    labels = sorted(shown, key=lambda label: label == BOUND)
    figure.legend([shown[label] for label in labels], labels, loc="outside lower center", ncols=num_columns)
    return figure


def errors(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return the distances from each median down to its lowest and up to its highest value, as errorbar takes them."""
    return [[item.median - item.low for item in spreads], [item.high - item.median for item in spreads]]


def median_line(axes: Axes, at: Sequence[float], spreads: Sequence[Spread], **style: Any) -> None:
    """Draw a line through the medians at the x values `at`, with an error bar from lowest to highest run at each."""
    axes.errorbar(at, [item.median for item in spreads], errors(spreads), capsize=3, **style)


def bound_line(axes: Axes, at: Sequence[float], bounds: Sequence[float], colour: str, mark: str) -> None:
    """Draw the theoretical limits of speed `bounds` at the x values `at` as a dashed line, named in the legend."""
    axes.plot(at, bounds, color=colour, linestyle="--", linewidth=1.2, marker=mark, markerfacecolor="white")
    name_bound(axes)


def name_bound(axes: Axes) -> None:
    """Add an entry for the dashed lines of the theoretical limits to the legend."""
    axes.plot([], [], color="black", linestyle="--", label=BOUND)


def powers_of_two(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic to base 2, with ticks only at these values."""
    axes.set_xscale("log", base=2)
    name_values(axes, values)


def name_values(axes: Axes, values: Sequence[float]) -> None:
    """Give the x axis ticks at these values only."""
    axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
