"""The picture of a study: every way at its best, over the length of proposals and over each condition."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from inference.comparison.plan.config import ComparisonConfig
from inference.comparison.report.plots import DRAFT_COLOURS, DRAFT_MARKS, STYLE, mark_emulated
from inference.comparison.study.advice import Evidence, Trial, crossovers

_NUMBERS = {
    "gamma": "gamma (draft tokens of a round)",
    "max_new_tokens": "output tokens of a request",
    "rtt_ms": "round trip (ms)",
    "temperature": "temperature",
    "concurrency": "requests in flight",
}
_LOGARITHMIC = ("gamma", "max_new_tokens", "concurrency")
MAX_COLUMNS = 3


def draw(evidence: Evidence, config: ComparisonConfig, file: Path) -> bool:
    """Write the picture, if there is more than one value of anything."""
    names = [name for name in _NUMBERS if any(len(evidence.over(name, it.contender)) > 1 for it in evidence.leaders)]
    if not names:
        return False
    with mpl.rc_context(STYLE):
        figure = over_conditions(evidence, names)
        mark_emulated(figure, config)
        figure.savefig(file)
    return True


def over_conditions(evidence: Evidence, names: list[str]) -> Figure:
    """A panel per condition, a line per way; a dotted line where load makes it lose."""
    num_columns = min(MAX_COLUMNS, len(names))
    num_rows = -(-len(names) // num_columns)
    height = 3.2 * num_rows + 0.25 * len(evidence.leaders) + 0.5
    figure = Figure(figsize=(max(6.0, 3.6 * num_columns), height), layout="constrained")
    panels = [axes for row in figure.subplots(num_rows, num_columns, squeeze=False, sharey=True) for axes in row]
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        _panel(axes, name, {trial.contender.label: evidence.over(name, trial.contender) for trial in evidence.leaders})
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("speed-up over the target alone")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1)
    return figure


def _panel(axes: Axes, name: str, lines: dict[str, dict[float, Trial]]) -> None:
    for (label, trials), colour, mark in zip(lines.items(), DRAFT_COLOURS, DRAFT_MARKS, strict=False):
        speedups = [trial.speedup for trial in trials.values()]
        errors = [[it.median - it.low for it in speedups], [it.high - it.median for it in speedups]]
        style = {"color": colour, "marker": mark, "capsize": 3, "label": label}
        axes.errorbar(list(trials), [it.median for it in speedups], errors, **style)  # type: ignore[arg-type]
        for crossed in (
            crossovers({at: it.speedup.median for at, it in trials.items()}) if name == "concurrency" else ()
        ):
            axes.axvline(crossed, color=colour, linestyle=":", linewidth=1.2)
    axes.axhline(1.0, color="#5f5f5f", linewidth=1.2)
    axes.set_xlabel(_NUMBERS[name])
    if name in _LOGARITHMIC:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({at for trials in lines.values() for at in trials})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
