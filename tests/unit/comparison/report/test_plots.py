"""What the pictures show is all there."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from comparison.plan.backend import BackendConfig
from comparison.plan.config import ALONE, NetworkConfig, PromptSet, Topology, WorkloadConfig
from comparison.plan.endpoint import Endpoint
from comparison.report.findings import short_conditions
from comparison.report.html import render
from comparison.report.plots import (
    draw_all,
    latency_shares,
    speedup_by_kind,
    speedup_over_gamma,
    speedups,
    tokens_over_rtt,
)
from inference.config import Emulation, PassTime
from tests.support.samples import config, findings, model_directory, record, samples


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
            assert float(np.max(np.asarray(line.get_ydata(), dtype=float), initial=low)) <= high


def test_every_draft_has_a_line(tmp_path: Path) -> None:
    """The story: there were six colours, and the seventh draft of a sweep was left out without a word."""
    drafts = tuple(str(model_directory(tmp_path, f"draft{number}")) for number in range(7))
    topologies = Topology.TARGET, Topology.FUSED
    figure = speedup_over_gamma(findings(config(tmp_path, draft_models=drafts, topologies=topologies, gammas=(1, 3))))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label for label in labels if label.startswith("draft: ")] == [
        f"draft: draft{number}" for number in range(7)
    ]


def test_many_round_trips_make_a_picture_longer_and_not_wider(tmp_path: Path) -> None:
    """With three ways and three round trips there were seven panels side by side, whose text a page shrank to dots."""
    one, three = (
        speedup_over_gamma(findings(config(tmp_path, gammas=(1, 3), network=NetworkConfig(rtts_ms=rtts_ms))))
        for rtts_ms in ((0.0,), (0.0, 10.0, 50.0))
    )
    assert len(three.axes) == len(one.axes) + 2 * 2 * 2  # two kinds, two ways with a network, two further round trips
    assert three.get_figwidth() == one.get_figwidth()


def test_a_report_of_endpoints_has_no_bound(tmp_path: Path) -> None:
    """The story: it had a bound in its legend that nobody could draw, round trips below 0, and topologies of nobody."""
    both = tuple(Endpoint(name, "grpc://127.0.0.1:1") for name in "ab")
    measured = findings(config(tmp_path, topologies=(), endpoints=both, network=NetworkConfig((0.0,))))
    figure = tokens_over_rtt(measured)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert [axes.get_xticks().tolist() for axes in figure.axes] == [[0.0]] * len(figure.axes)
    page = render(measured, [])
    assert "Servers that were running already: speed" in page
    assert "Target alone, both" not in page
    assert "times over those of a</caption>" in page
    assert "times over those of the target alone</caption>" not in page
    assert "RTT" not in page
    said = " ".join((*speedups(measured), short_conditions(measured.config)))
    assert (" ms" in said, "cores per model" in said) == (False, False)
    assert speedup_by_kind(measured).axes[0].get_title() == "1 in flight, endpoints where they are"


@pytest.mark.parametrize(
    "emulation", [Emulation(), Emulation(PassTime(0.025), PassTime(0.003))], ids=["real", "emulated"]
)
def test_every_picture_says_whether_it_is_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulation: Emulation
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: titles.append(figure.get_suptitle()))
    workload = WorkloadConfig((PromptSet("structured", ("1 2 3",)),), num_runs=2, concurrencies=(1, 4))
    settings = config(tmp_path, gammas=(1, 3), workload=workload, backend=BackendConfig(emulation=emulation))
    assert len(draw_all(findings(settings), tmp_path)) == len(titles) >= 4
    label = "EMULATED: passes asleep for at least target:25ms,draft:3ms" if emulation.target.base_s else ""
    assert set(titles) == {label}


def test_rates_of_many_clients_are_named(tmp_path: Path) -> None:
    """With --concurrency 4 alone its tokens per second stood on an axis "one client"."""
    workload = WorkloadConfig((PromptSet("structured", ("1 2 3",)),), num_runs=2, concurrencies=(4,))
    measured = findings(config(tmp_path, workload=workload))
    figure = tokens_over_rtt(measured)
    assert latency_shares(measured).axes[0].get_title() == "4 in flight, round trip 0 ms"
    assert figure.axes[0].get_ylabel() == "tokens per second, 4 in flight"


def test_itl_of_pictures_and_tables_agree(tmp_path: Path) -> None:
    """The picture had the gaps between messages under that name, which with speculation are several times as long."""
    measured = findings(config(tmp_path))
    figure = latency_shares(measured)
    [axes] = [each for each in figure.axes if each.get_xlabel().startswith("ITL")]
    drawn = [float(np.max(np.asarray(line.get_xdata(), dtype=float))) for line in axes.lines]
    of_target, of_fused = (measured.services[index].values["inter_token_latency_s"] for index in (0, 1))
    assert drawn[:2] == pytest.approx([max(of_target) * 1e3, max(of_fused) * 1e3])


def test_an_uncertain_speed_up_says_so(tmp_path: Path) -> None:
    """The page began with "0.81 times", and said three tables below that there was no difference."""
    workload = WorkloadConfig((PromptSet("k", ("a", "b")),), num_runs=2)
    settings = config(tmp_path, topologies=(Topology.TARGET, Topology.FUSED), workload=workload)
    equal = samples(settings)
    assert speedups(findings(settings, equal)) == ["k, fused: 2.00 times at 0 ms, 2.00 times at 10 ms"]
    scatter = itertools.cycle((3.0, 0.3, 2.5, 0.5))
    noisy = [
        replace(sample, records=tuple(record(ALONE, prompt_index=i, slowdown=next(scatter)) for i in range(2)))
        if sample.cell.contender.topology is Topology.FUSED
        else sample
        for sample in equal
    ]
    [told] = speedups(findings(settings, noisy))
    assert told.count("(no difference)") == 2
    [told] = speedups(findings(settings, [sample for sample in noisy if sample.repeat == 0]))
    assert told.count("(too few to tell)") == 2
