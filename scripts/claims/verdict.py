"""Verdict on one claim (whether measurements confirm it), and the page with all verdicts."""

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
    """Result of the measurements for one claim.

    Attributes:
        claim: the claim as a sentence, with its threshold.
        measured: what was found, in one line.
        holds: whether the claim holds; None if that could not be judged, and then `measured` has the reason.
        details: rows of a table, the first of which is its header; empty for no table.
    """

    claim: str
    measured: str
    holds: bool | None
    details: Sequence[Sequence[str]] = ()

    @property
    def word(self) -> str:
        return {True: "pass", False: "**FAIL**", None: "not judged"}[self.holds]


def page(verdicts: Sequence[Verdict], command: str, load: float) -> str:
    """Return a Markdown page with the date, the machine, and the results and tables of all claims.

    `command` is the command line of the run, `load` the load average before it.
    """
    here = machine()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    conditions = (
        f"`{command}`, {datetime.date.today():%Y-%m-%d}, commit {commit()}: {here['cpu']}, {here['cores']} cores, "
        f"{here['system']}; {versions}; load average {load:.1f} before. Thresholds: `scripts/claims/plan.py`."
    )
    table = markdown(["claim", "measured", "verdict"], [[each.claim, each.measured, each.word] for each in verdicts])
    details = [f"## {each.claim}\n\n{markdown(each.details[0], each.details[1:])}" for each in verdicts if each.details]
    return "\n\n".join(["# Claims", textwrap.fill(conditions, WIDTH), table, *details]) + "\n"
