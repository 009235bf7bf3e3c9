"""Journal of a study that serves one way at a time: a file of finished measurements, by which it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.comparison.plan.config import Contender
from specdec.comparison.report.summary import Spread
from specdec.comparison.study.advice import Trial
from specdec.comparison.study.space import Conditions

FILE = "trials.jsonl"
_FREE = ("gamma", "draft_models", "budget", "anyway", "price_per_hour", "output")
"""Settings that may change between an interrupted study and its continuation."""


class Journal:
    """Measurements that a study has finished, and the differences between answers that they showed.

    Args:
        file: file with a line for the settings, then one for each measurement. Measurements made with other settings
            are removed.
        asked: all flags in the format of a --config file.
    """

    def __init__(self, file: Path, asked: str) -> None:
        self._file = file
        settings = json.dumps([line for line in asked.splitlines() if line.partition(" =")[0] not in _FREE])
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        before, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]  # a line without an end was cut off
        lines = lines if before == settings else []
        file.write_text("\n".join([settings, *lines, ""]), encoding="utf-8")
        done = [json.loads(line) for line in lines]
        self.trials = {(trial.place, trial.contender): trial for trial in (_trial(each["trial"]) for each in done)}
        self.differences = [difference for each in done for difference in each["differences"]]

    def add(self, trial: Trial, differences: Sequence[str]) -> None:
        """Append a finished measurement, and the differences between answers that it showed, to the file."""
        values = {**asdict(trial), "contender": trial.contender.as_json()}
        line = json.dumps({"trial": values, "differences": list(differences)})
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.trials[trial.place, trial.contender] = trial
        self.differences += differences

    def close(self) -> None:
        """Remove the file, since nothing is left to do: another study starts from the beginning."""
        self._file.unlink(missing_ok=True)


def _trial(values: dict[str, Any]) -> Trial:
    read = {"place": Conditions(**values["place"]), "contender": Contender.of_json(values["contender"])}
    return Trial(**{**values, **read, "speedup": Spread(**values["speedup"])})
