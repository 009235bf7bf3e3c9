"""Files of a search for capacities: capacity.json, capacity.md and capacity.png."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.comparison.plan.config import ComparisonConfig, Topology
from specdec.comparison.report.files import with_matplotlib
from specdec.comparison.report.findings import emulation_of, measured_conditions
from specdec.comparison.report.markdown import markdown, page_part, write_part
from specdec.comparison.study.capacity import Capacities, Capacity
from specdec.comparison.study.space import way
from specdec.inference.config import NOT_EMULATED

HEADER = (
    *("served by", "round trip, ms", "streams", "over the target alone", "TTFT p99, ms", "tokens a pass", "pass, ms"),
)
EMULATED = "emulated, ms"
PICTURE = "Rate of a slow stream over the number of streams, by round trip"
BUSY = "**The machine was busy with other work: repeat this on a quiet one.**"
WIDTH = 120


def json_of(found: Capacities) -> dict[str, Any]:
    """Return the content of capacity.json; times are in seconds."""
    return {
        "emulated": str(found.config.backend.emulation) or None,
        "same_tokens": not found.differences,
        "duration_s": round(found.duration_s, 1),
        "slo": str(found.config.workload.slo),
        "predicted_over_fused": predicted(found),
        "capacities": [_json(it) for it in found.found],
        "conditions": dict(measured_conditions(found.config, found.load)),
    }


def write_capacities(found: Capacities, directory: Path) -> None:
    """Write capacity.md, and the part of a page that --page names, each with its picture if matplotlib is installed."""
    text = _with_picture(found, directory / "capacity.png")
    (directory / "capacity.md").write_text(f"# Capacity\n\n{text}", encoding="utf-8")
    if page := found.config.page:
        file, name = page_part(page)
        write_part(page, _with_picture(found, file.with_name(f"{name}.png")))


def _json(it: Capacity) -> dict[str, Any]:
    figures = asdict(it)
    del figures["contender"]
    return {"served_by": way(it.contender), "label": it.contender.label, **figures}


def text_of(found: Capacities) -> str:
    """Return the report in Markdown: conditions, a table of the capacities, and the predicted gain."""
    config, alone = found.config, found.found[0].streams if found.found else 0
    conditions = dict(measured_conditions(config, found.load))
    head = (
        f"{emulation_of(config) or 'Real passes'}. Promised: {config.workload.slo}. {conditions['Prompts']}. "
        f"{conditions['Host']}; {conditions['Host load']}. {BUSY if found.load.is_busy else ''}"
    )
    lines = [textwrap.fill(head.strip(), WIDTH, break_on_hyphens=False)]
    header = HEADER if config.backend.emulation == NOT_EMULATED else (*HEADER, EMULATED)
    lines.append(markdown(header, [row(it, alone, config)[: len(header)] for it in found.found]))
    lines += [_prediction(found)] if predicted(found) else []
    lines += [f"Different tokens: {difference}" for difference in found.differences]
    return "\n\n".join(lines) + "\n"


def row(it: Capacity, alone: int, config: ComparisonConfig) -> list[str]:
    """Return a row of the table: the most streams of one way to serve, and the figures measured with them.

    Args:
        alone: most streams of the target alone; 0 if it serves none.
    """
    streams = f"at least {it.streams}" if it.is_limit else str(it.streams)
    trip = f"{it.rtt_ms:g}" if it.contender.topology.is_split else f"up to {it.rtt_ms:g}"
    place = [way(it.contender), trip, streams, f"{it.streams / alone:.1f}" if alone else "-"]
    if (best := it.best) is None:
        return [*place, *("-" for _ in (*HEADER, EMULATED)[len(place) :])]
    emulated_s = config.backend.emulation.target.seconds(best.streams, round(best.streams * (1 + best.num_drafted)))
    return [
        *place,
        f"{best.ttft_s * 1e3:.0f}",
        f"{best.tokens_per_pass:.2f}",
        f"{best.pass_s * 1e3:.0f}",
        f"{emulated_s * 1e3:.0f}",
    ]


def predicted(found: Capacities) -> float | None:
    """Return the predicted gain of a draft on another device: its streams over those with one on the target's device.

    arXiv 2606.25091 predicts 1 + gamma t_d / t_v: gamma draft steps of t_d each over a verification of t_v. None if
    serving with both models in one server (fused) was not measured.
    """
    best = next((it.best for it in found.found if it.contender.topology is Topology.FUSED), None)
    return None if best is None else 1 + best.draft_share


def _prediction(found: Capacities) -> str:
    fused = next(it.streams for it in found.found if it.contender.topology is Topology.FUSED)
    remote = [it.streams / fused for it in found.found if it.contender.topology.is_split]
    measured = f"{min(remote):.2f} to {max(remote):.2f}" if remote else "none"
    text = (
        "Over the fused service: arXiv 2606.25091 predicts 1 + gamma t_d / t_v (gamma draft steps over a verification) "
        f"times its streams for a draft on another device, here {predicted(found):.2f}, if drafting is in rounds and "
        f"passes cost the same over more rows, which is not so here. Measured: {measured}."
    )
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _with_picture(found: Capacities, picture: Path) -> str:
    """Draw the picture; return the report with it, or without it if matplotlib is not installed."""
    is_drawn = with_matplotlib(picture, lambda: draw(found, picture))
    return f"![{PICTURE}]({picture.name})\n\n{text_of(found)}" if is_drawn else text_of(found)


def draw(found: Capacities, file: Path) -> None:
    """Draw the rate of a slow stream over the number of streams: a panel per round trip, a line per way to serve."""
    import matplotlib as mpl  # takes a second to import
    from matplotlib.axes import Axes

    from specdec.comparison.report.chart_style import DRAFTS, STYLE, panels, powers_of_two, save

    config = found.config
    promised = 1 / config.itl_s
    most = max((probe.streams for it in found.found for probe in it.probes), default=1)  # the budget had room for none
    looks = dict(zip(dict.fromkeys(way(it.contender) for it in found.found), itertools.cycle(DRAFTS), strict=False))

    def panel(axes: Axes, _: str, rtt_ms: float) -> None:
        for it in found.found:
            if it.rtt_ms == rtt_ms or not it.contender.topology.is_split:
                colour, mark = looks[name := way(it.contender)]
                rates = {probe.streams: 1 / probe.itl_s for probe in it.probes if probe.itl_s}
                points = sorted(rates.items())
                axes.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=4, label=name)
        axes.axhline(promised, color="black", linestyle="--", linewidth=1.0, label="promised")
        axes.set_title(f"round trip {rtt_ms:g} ms")
        powers_of_two(axes, [2**i for i in range(most.bit_length() + 1)])

    with mpl.rc_context(STYLE):
        names = ["tokens/s that 9 of 10\nstreams have"], ["streams"] * len(config.network.rtts_ms)
        save(panels([""], config.network.rtts_ms, panel, size=(3.2, 3.4), names=names), file, config)
