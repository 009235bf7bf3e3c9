"""The pictures of a study: the leaders over each condition, with the crossover, and drafts over lengths."""

from __future__ import annotations

import base64
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from inference.comparison.plan.config import ComparisonConfig
from inference.comparison.report.plots import DRAFT_COLOURS, DRAFT_MARKS, STYLE, mark_emulated
from inference.comparison.study.advice import Evidence, Trial, crossovers
from inference.comparison.study.space import way

_NUMBERS = {
    "concurrency": "requests in flight",
    "max_new_tokens": "output tokens of a request",
    "rtt_ms": "round trip (ms)",
    "temperature": "temperature",
}
_LOGARITHMIC = ("concurrency", "max_new_tokens")


def draw(evidence: Evidence, config: ComparisonConfig, directory: Path) -> list[tuple[str, str]]:
    """Write the pictures that there are data for; return (title, data URL) of each."""
    with mpl.rc_context(STYLE):
        drawn = {
            "conditions": ("Speed-up of each way at its best, over one condition at a time", over_conditions(evidence)),
            "lengths": ("Speed-up over the draft tokens of a round, by draft", over_lengths(evidence)),
        }
        found = []
        for name, (title, figure) in drawn.items():
            if figure is not None:
                mark_emulated(figure, config)
                figure.savefig(directory / f"study_{name}.png")
                found.append((title, _data_url(directory / f"study_{name}.png")))
    return found


def _data_url(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode('ascii')}"


def over_conditions(evidence: Evidence) -> Figure | None:
    """A panel per condition with several values; a dotted line where load makes a way lose."""
    factors = [name for name in _NUMBERS if any(len(evidence.over(name, it.contender)) > 1 for it in evidence.leaders)]
    if not factors:
        return None
    figure, panels = _panels(len(factors))
    for axes, factor in zip(panels, factors, strict=True):
        for trial, colour, mark in zip(evidence.leaders, DRAFT_COLOURS, DRAFT_MARKS, strict=False):
            trials = evidence.over(factor, trial.contender)
            _line(axes, trials, colour, mark, trial.contender.label)
            if factor == "concurrency":
                for crossed in crossovers({load: it.speedup.median for load, it in trials.items()}):
                    axes.axvline(crossed, color=colour, linestyle=":", linewidth=1.2)
        axes.set_xlabel(_NUMBERS[factor])
        _ticks(axes, sorted({at for it in evidence.leaders for at in evidence.over(factor, it.contender)}), factor)
    return _finished(figure, panels)


def over_lengths(evidence: Evidence) -> Figure | None:
    """A panel per way, a line per draft."""
    trials = evidence.at(evidence.space.usual)
    ways = [it for it in dict.fromkeys(way(trial.contender) for trial in trials) if len(_gammas(trials, it)) > 1]
    if not ways:
        return None
    drafts = sorted({trial.contender.draft_name for trial in trials})
    figure, panels = _panels(len(ways))
    for axes, name in zip(panels, ways, strict=True):
        for draft, colour, mark in zip(drafts, DRAFT_COLOURS, DRAFT_MARKS, strict=False):
            of_draft = [it for it in trials if way(it.contender) == name and it.contender.draft_name == draft]
            by_gamma = {float(it.contender.gamma or 0): it for it in reversed(of_draft)}  # the best of several branches
            _line(axes, dict(sorted(by_gamma.items())), colour, mark, f"draft {draft}")
        axes.set_title(name)
        axes.set_xlabel("gamma (draft tokens of a round)")
        _ticks(axes, sorted(_gammas(trials, name)), "gamma")
    return _finished(figure, panels)


def _gammas(trials: list[Trial], name: str) -> set[float]:
    return {float(trial.contender.gamma or 0) for trial in trials if way(trial.contender) == name}


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(6.0, 3.6 * count), 4.2), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, sharey=True)[0])


def _line(axes: Axes, trials: dict[float, Trial], colour: str, mark: str, label: str) -> None:
    if not trials:
        return
    speedups = [trial.speedup for trial in trials.values()]
    errors = [[it.median - it.low for it in speedups], [it.high - it.median for it in speedups]]
    medians = [it.median for it in speedups]
    axes.errorbar(list(trials), medians, errors, color=colour, marker=mark, capsize=3, label=label)


def _ticks(axes: Axes, values: list[float], factor: str) -> None:
    if factor in _LOGARITHMIC:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _finished(figure: Figure, panels: list[Axes]) -> Figure:
    for axes in panels:
        axes.axhline(1.0, color="#5f5f5f", linewidth=1.2)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("speed-up over the target alone (line at 1)")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure
