"""What the pictures show is all there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from inference.comparison.plan.config import NetworkConfig, PromptSet, WorkloadConfig
from inference.comparison.report.plots import tokens_over_rtt
from tests.support.samples import config, findings, record, samples


def test_a_faster_kind_of_prompt_is_not_cut_off(tmp_path: Path) -> None:
    """The panels share their y axis. Its lower end was set panel by panel, which froze the upper one after the first:
    where open-ended prompts were faster than structured ones, their line left the picture."""
    sets = (PromptSet("structured", ("1 2 3",)), PromptSet("open_ended", ("It was",)))
    settings = config(tmp_path, network=NetworkConfig(rtts_ms=(0.0, 10.0)), workload=WorkloadConfig(sets, num_runs=2))
    measured = [
        sample
        if sample.cell.kind == "structured"
        else replace(sample, records=(record(sample.cell.contender, rtt_ms=sample.cell.rtt_ms, slowdown=0.4),))
        for sample in samples(settings)
    ]
    figure = tokens_over_rtt(findings(settings, measured))
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert low == 0.0
        for line in axes.lines:
            assert float(np.max(np.asarray(line.get_ydata(), dtype=float))) <= high
