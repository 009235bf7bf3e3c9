"""Verdict on one claim, and the page of all."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import machine
from specdec.comparison.report.markdown import commit, markdown

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one claim.

    Attributes:
        claim: sentence that is claimed, with its threshold.
        measured: what was found, in one line.
        holds: None if it could not be judged; `measured` has the reason.
        details: rows of a table, the first of which is its header.
    """

    claim: str
    measured: str
    holds: bool | None
    details: Sequence[Sequence[str]] = ()

    @property
    def word(self) -> str:
        return {True: "pass", False: "**FAIL**", None: "not judged"}[self.holds]


def page(verdicts: Sequence[Verdict], command: str, load: float) -> str:
    """Return a Markdown page with date, machine and all figures."""
    here = machine()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    conditions = (
        f"`{command}`, {datetime.date.today():%Y-%m-%d}, commit {commit()}: {here['cpu']}, {here['cores']} cores, "
        f"{here['system']}; {versions}; load average {load:.1f} before. Thresholds: `scripts/claims/plan.py`."
    )
    table = markdown(["claim", "measured", "verdict"], [[each.claim, each.measured, each.word] for each in verdicts])
    details = [f"## {each.claim}\n\n{markdown(each.details[0], each.details[1:])}" for each in verdicts if each.details]
    return "\n\n".join(["# Claims", textwrap.fill(conditions, WIDTH), table, *details]) + "\n"
