"""A study that is over, as files: advice for people and machines, the evidence, and the recommended service."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from inference.comparison.plan.config import ComparisonConfig, Contender
from inference.comparison.report.findings import conditions, emulation_of
from inference.comparison.study.advice import Evidence, Prices, Trial, crossovers, sentences
from inference.comparison.study.service import service_toml

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Study:
    """All that the report is about.

    Attributes:
        differences: answers that were not the target's, as sentences; there should be none.
        prices: None: nobody asks.
    """

    config: ComparisonConfig
    evidence: Evidence
    differences: tuple[str, ...]
    prices: Prices | None
    duration_s: float

    @property
    def advised(self) -> Contender | None:
        """None: the target alone."""
        best = self.evidence.best(self.evidence.space.usual)
        return best.contender if best else None

    @property
    def sentences(self) -> list[str]:
        label = emulation_of(self.config)
        return [*([f"{label}."] if label else []), *sentences(self.evidence, self.prices), *self.differences]


def write_study(study: Study, directory: Path) -> dict[str, Any]:
    """Write study.json, service.toml and, where matplotlib is, study.html; return the content of study.json."""
    results = json_of(study)
    (directory / "study.json").write_text(json.dumps(results, indent=1) + "\n")
    reason = next(iter(sentences(study.evidence, None)))
    (directory / "service.toml").write_text(service_toml(study.config, study.advised, reason), encoding="utf-8")
    try:
        from inference.comparison.report import html
        from inference.comparison.study.plots import draw
    except ModuleNotFoundError as error:
        logger.warning("no study.html: it needs the package %s, which is not installed", error.name)
        return results
    picture = directory / "study.png"
    pictures = (
        [html.picture(picture, "Speed-up of every way at its best")]
        if draw(study.evidence, study.config, picture)
        else []
    )
    page = html.page("When speculation pays", [*_advice(study), *pictures, *_evidence(study)])
    (directory / "study.html").write_text(page, encoding="utf-8")
    return results


def json_of(study: Study) -> dict[str, Any]:
    """Times in seconds."""
    evidence, prices = study.evidence, study.prices
    return {
        "emulated": str(study.config.backend.emulation) or None,
        "same_tokens": not study.differences,
        "duration_s": round(study.duration_s, 1),
        "usual": asdict(evidence.space.usual),
        "recommended": _contender(study.advised),
        "advice": study.sentences,
        "crossovers_in_flight": {
            trial.contender.label: crossovers(
                {load: it.speedup.median for load, it in evidence.over("concurrency", trial.contender).items()}
            )
            for trial in evidence.leaders
        },
        "trials": [_trial(trial, prices) for trial in evidence.trials],
        "not_tried": [
            {**asdict(group.place), "contenders": [contender.label for contender in group.contenders]}
            for group in evidence.skipped
        ],
        "num_combinations": evidence.space.num_trials,
        "conditions": dict(conditions(study.config)),
    }


def _contender(contender: Contender | None) -> dict[str, Any]:
    if contender is None:
        return {"topology": "target"}
    schedule = contender.schedule.value if contender.schedule else None
    return {**asdict(contender), "topology": contender.topology.value, "schedule": schedule}


def _trial(trial: Trial, prices: Prices | None) -> dict[str, Any]:
    cost = prices.per_million_tokens(trial.contender, trial.tokens_per_s) if prices else None
    alone = prices.per_million_tokens(None, trial.alone_tokens_per_s) if prices else None
    costs = {"cost_per_million_tokens": cost, "alone_cost_per_million_tokens": alone}
    return {**asdict(trial), "contender": _contender(trial.contender), **costs}


def _advice(study: Study) -> list[str]:
    mood = "verdict bad" if emulation_of(study.config) or study.differences else "verdict"
    first, *others = study.sentences
    return ["<h1>When speculation pays</h1>", f'<p class="{mood}">{escape(first)}</p>', _list(others)]


def _evidence(study: Study) -> list[str]:
    head = "".join(f'<th scope="col" class="text">{name}</th>' for name in _COLUMNS)
    rows = "".join(map(_row, study.evidence.trials))
    return [
        f"<h2>Evidence</h2><p>{escape(emulation_of(study.config))}</p>",
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>',
        "<h2>Not tried, for want of time</h2>",
        _list([str(group) for group in study.evidence.skipped] or ["nothing that the search wanted"]),
        "<h2>Conditions</h2>",
        _list([f"{name}: {text}" for name, text in conditions(study.config)]),
    ]


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


_COLUMNS = (
    "conditions",
    "served by",
    "speed-up (range of runs)",
    "tokens/s",
    "target alone",
    "TTFT ms",
    "acceptance rate",
)


def _row(trial: Trial) -> str:
    acceptance = "-" if trial.acceptance_rate is None else f"{trial.acceptance_rate:.2f}"
    figures = f"{trial.tokens_per_s:.1f}", f"{trial.alone_tokens_per_s:.1f}", f"{trial.ttft_s * 1e3:.0f}", acceptance
    texts = str(trial.place), trial.contender.label, str(trial), *figures
    cells = (f'<td class="text">{escape(text)}</td>' for text in texts)
    return f"<tr>{''.join(cells)}</tr>"
