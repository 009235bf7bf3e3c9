"""Files of a finished study: advice for people and machines, the evidence, and the recommended service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.comparison.plan.config import ComparisonConfig, Contender
from specdec.comparison.plan.roles import MARGIN, TIE, service_toml
from specdec.comparison.report.files import with_matplotlib
from specdec.comparison.report.findings import emulation_of, measured_conditions
from specdec.comparison.study.advice import Evidence, Prices, Trial, crossovers, sentences
from specdec.inference.observe.host_load import HostLoad, busy_warning


@dataclass(frozen=True, slots=True)
class Study:
    """Results of a study.

    Attributes:
        evidence: all measurements, and what follows from them.
        differences: sentences on answers that differ from the target's; there should be none.
        prices: prices of machines; None for advice without costs.
        duration_s: seconds of the whole study.
        load: load of this host during the study.
        spread: tokens/s of the fastest of equal runs over those of the slowest; see `spread_of`.
        anyway: whether to advise even if the machine was busy.
    """

    config: ComparisonConfig
    evidence: Evidence
    differences: tuple[str, ...]
    prices: Prices | None
    duration_s: float
    load: HostLoad
    spread: float = 1.0
    anyway: bool = False

    @property
    def advised(self) -> Contender | None:
        """Way to serve that is advised under the usual conditions; None for the target alone."""
        best = self.evidence.best(self.evidence.space.usual)
        return best.contender if best else None

    @property
    def warning(self) -> str:
        """Reason why figures are unreliable; empty if the machine was quiet and equal runs took equally long."""
        return busy_warning(self.load, self.spread)

    @property
    def is_withheld(self) -> bool:
        """Return whether advice is withheld, since the figures are unreliable (see `warning`) without --anyway."""
        return bool(self.warning) and not self.anyway

    @property
    def reservations(self) -> list[str]:
        """Sentences on what makes the study's figures doubtful, to be read before its advice; empty if nothing does."""
        label = emulation_of(self.config)
        withheld = [_WITHHELD] if self.is_withheld else []
        return [*([f"{label}."] if label else []), *filter(None, [self.warning]), *withheld]

    @property
    def sentences(self) -> list[str]:
        advice = [] if self.is_withheld else sentences(self.evidence, self.prices)
        return [*self.reservations, *advice, *self.differences]


_WITHHELD = "So there is no advice, and no service.toml; --anyway gives both."


def write_study(study: Study, directory: Path) -> None:
    """Write service.toml and study.html. Without advice remove service.toml; without matplotlib write no page."""
    service = directory / "service.toml"
    if study.is_withheld:
        service.unlink(missing_ok=True)  # an earlier study's file would look like this one's
    else:
        reason = next(iter(sentences(study.evidence, None)))
        service.write_text(service_toml(study.config, study.advised, reason), encoding="utf-8")
    page = directory / "study.html"
    with_matplotlib(page, lambda: page.write_text(_page(study, directory), encoding="utf-8"))


def json_of(study: Study) -> dict[str, Any]:
    """Return the content of study.json; times are in seconds."""
    evidence, prices = study.evidence, study.prices
    advised = {"topology": "target"} if study.advised is None else study.advised.as_json()
    return {
        "emulated": str(study.config.backend.emulation) or None,
        "same_tokens": not study.differences,
        "duration_s": round(study.duration_s, 1),
        "usual": asdict(evidence.space.usual),
        "warnings": [study.warning] if study.warning else [],
        "load": {**asdict(study.load), "spread": study.spread},
        "recommended": None if study.is_withheld else advised,
        "advice": study.sentences,
        "crossovers_in_flight": {
            trial.contender.label: crossovers(evidence.over("concurrency", trial.contender))
            for trial in evidence.leaders
        },
        "trials": [_trial(trial, prices) for trial in evidence.trials],
        "not_tried": [
            {**asdict(group.place), "contenders": [contender.label for contender in group.contenders]}
            for group in evidence.skipped
        ],
        "num_combinations": evidence.space.num_trials,
        "conditions": dict(measured_conditions(study.config, study.load)),
    }


def _trial(trial: Trial, prices: Prices | None) -> dict[str, Any]:
    cost = prices.per_million_tokens(trial.contender, trial.tokens_per_s) if prices else None
    alone = prices.per_million_tokens(None, trial.alone_tokens_per_s) if prices else None
    costs = {"cost_per_million_tokens": cost, "alone_cost_per_million_tokens": alone}
    return {**asdict(trial), "contender": trial.contender.as_json(), **costs}


def _page(study: Study, directory: Path) -> str:
    from specdec.comparison.report import html  # matplotlib takes a second to import, and is needed only now
    from specdec.comparison.study.plots import draw

    label = emulation_of(study.config)
    num_first = len(study.reservations) + (not study.is_withheld)
    pictures = draw(study.evidence, study.config, directory / "study.png")
    skipped = [str(group) for group in study.evidence.skipped]
    trials = html.Table(f"All trials. {label}", _COLUMNS, list(map(_row, study.evidence.trials)))
    parts: dict[str, Sequence[html.Block]] = {
        "Advice": [("listed", study.sentences[num_first:] or ["None: the reason stands above."])],
        "Pictures": [("figure", picture) for picture in pictures],
        "Evidence": [("table", trials)],
        "Not tried, since the time was over": [("listed", skipped or ["Nothing that the search wanted."])],
        "Conditions": [("named", measured_conditions(study.config, study.load))],
        "How to read it": [("listed", _EXPLAINED)],
    }
    verdict = " ".join(study.sentences[:num_first]), bool(study.reservations or study.differences)
    return html.page(html.Header("When speculation pays", [verdict]), parts, study.config)


_EXPLAINED = (
    "speed-up: tokens/s over those of the target alone in the same run, at the same conditions; median and range. "
    "Below 1, a draft costs time.",
    "tokens/s: of all clients together, from the first request sent to the last one answered.",
    "TTFT: from sending to the first token; median. acceptance rate: accepted / verified draft tokens.",
    f"A draft is advised if its speed-up is {MARGIN} or more, and above 1 in every run; the simplest way within "
    f"{1 - TIE:.0%} of the best is advised.",
)
_COLUMNS = ("conditions", "served by", "speed-up (range)", "tokens/s", "target alone", "TTFT ms", "acceptance rate")


def _row(trial: Trial) -> list[str]:
    acceptance = "-" if trial.acceptance_rate is None else f"{trial.acceptance_rate:.2f}"
    figures = f"{trial.tokens_per_s:.1f}", f"{trial.alone_tokens_per_s:.1f}", f"{trial.ttft_s * 1e3:.0f}", acceptance
    return [str(trial.place), trial.contender.label, str(trial), *figures]
