"""Reports of made-up measurements: figures, files, page and pictures agree, and doubtful figures are marked."""

from __future__ import annotations

import base64
import csv
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import cast

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from rich.console import Console

from specdec.comparison.app import _report as report
from specdec.comparison.plan.backend import BackendConfig
from specdec.comparison.plan.config import ALONE, Contender, NetworkConfig, PromptSet, Topology, WorkloadConfig
from specdec.comparison.plan.datasets import Conversation
from specdec.comparison.plan.endpoint import Endpoint
from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.plan.slo import Slo, parse_slo
from specdec.comparison.report import html
from specdec.comparison.report.agreement import check_agreement
from specdec.comparison.report.chart_style import STYLE
from specdec.comparison.report.files import in_full, prepare_directory, write_report
from specdec.comparison.report.findings import Findings, conditions, json_of, short_conditions
from specdec.comparison.report.llmperf import write_llmperf
from specdec.comparison.report.markdown import page_part
from specdec.comparison.report.plots import (
    knee,
    latency_shares,
    speedup_by_kind,
    speedup_over_gamma,
    speedups,
    tokens_over_rtt,
)
from specdec.comparison.report.service import Service, describe
from specdec.comparison.report.table import load_table
from specdec.inference.config import ROOT, Emulation, PassTime
from specdec.inference.errors import ConfigError, SpecDecError
from specdec.inference.observe.host_load import HostLoad
from specdec.inference.request import Schedule
from tests.support.samples import (
    BUSY,
    PASS_S,
    QUIET,
    STEP_S,
    TOKENS,
    VERIFY_S,
    changed,
    config,
    findings,
    model_directory,
    samples,
    slowed,
)

ROUND_S = 3 * STEP_S + VERIFY_S
NEAR = NetworkConfig((0.0,))
ONE_KIND = (PromptSet("structured", ("1 2 3",)),)
TWO_KINDS = (*ONE_KIND, PromptSet("open_ended", ("It was",)))
THREE_KINDS = (*TWO_KINDS, PromptSet("code", ("def f",)))
TWO_PROMPTS = (PromptSet("k", ("a", "b")),)
EMULATED = BackendConfig(emulation=Emulation(PassTime(0.025), PassTime(0.003)))
LABEL = "EMULATED: passes asleep for at least target:25ms,draft:3ms"


def written(found: Findings) -> Path:
    prepare_directory(found.config.output)
    return in_full(found.config, "results.json", json_of(found), partial(write_report, found))


def is_of(topology: Topology, sample: Sample) -> bool:
    return sample.cell.contender.topology is topology


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report with every kind of picture; return its directory."""
    directory = tmp_path_factory.mktemp("sweep")
    settings = config(
        directory,
        gammas=(1, 7),
        schedules=(Schedule.SYNC, Schedule.ASYNC),
        network=NetworkConfig(rtts_ms=(0.0, 10.0), jitter_ms=2.0, bandwidth_mbps=100.0),
        workload=WorkloadConfig(TWO_KINDS, num_runs=2, concurrencies=(1, 4), request_rates=(2.0,)),
    )
    return written(findings(settings))


# Figures --------------------------------------------------------------------------------------------------------------


def test_speedup_is_run_by_run_with_its_spread(tmp_path: Path) -> None:
    """A speed-up is the ratio to the target alone in the same run.

    In the second run all servers are 10 % slower: speeds differ by that, and speed-ups do not.
    """
    cells = {cell["topology"]: cell for cell in json_of(findings(config(tmp_path, network=NEAR)))["cells"]}
    alone, fused = cells["target"], cells["fused"]
    assert [fused["speedup_min"], fused["speedup_max"]] == pytest.approx([3 * PASS_S / ROUND_S] * 2)
    assert fused["tokens_per_s_max"] / fused["tokens_per_s_min"] == pytest.approx(1.1)
    assert (fused["acceptance_rate"], fused["mean_acceptance_length"]) == (pytest.approx(2 / 3), 3)
    assert (alone["bound_tokens_per_s"], alone["bound_speedup"]) == (pytest.approx(1 / PASS_S), 1.0)
    assert alone["percent_of_bound"] == pytest.approx(50 + 50 / 1.1)  # median of the two runs


def test_without_the_target_there_is_no_speedup(tmp_path: Path) -> None:
    found = findings(config(tmp_path, topologies=(Topology.FUSED, Topology.DISTRIBUTED), network=NEAR))
    assert all(summary.speedup is None and summary.bound_speedup is None for summary in found.summaries)
    assert (written(found) / "report.html").is_file()


def test_prompts_are_paired_with_the_target_alone(tmp_path: Path) -> None:
    """Each prompt's time is compared with the target's own in the same run.

    The second run is slower for all servers, which cancels in pairs.
    """
    found = findings(config(tmp_path, workload=WorkloadConfig(TWO_PROMPTS, num_runs=3)))
    ratio = found.over_target(found.services[1], "end_to_end_latency_s")
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((ratio.estimate, ROUND_S / (3 * PASS_S)))
    assert ratio.num_pairs == 6
    assert found.over_target(found.services[0], "ttft_s") is None


def test_an_uncertain_speed_up_is_marked(tmp_path: Path) -> None:
    """A speed-up that may be chance is marked as such.

    Regression: the page began with "0.81 times", while a table below had "no difference".
    """
    workload = WorkloadConfig(TWO_PROMPTS, num_runs=2)
    settings = config(tmp_path, topologies=(Topology.TARGET, Topology.FUSED), workload=workload)
    assert speedups(findings(settings)) == ["k, fused: 2.00 times at 0 ms, 2.00 times at 10 ms"]
    scatter = itertools.cycle((6.0, 0.6, 5.0, 1.0))
    noisy = [
        slowed(sample, next(scatter), next(scatter)) if is_of(Topology.FUSED, sample) else sample
        for sample in samples(settings)
    ]
    for measured, doubt in ((noisy, "no difference"), ([it for it in noisy if it.repeat == 0], "too few to tell")):
        [sentence] = speedups(findings(settings, measured))
        assert sentence.count(f"({doubt})") == 2


def test_the_summary_recommends_what_to_run_at_each_round_trip(tmp_path: Path) -> None:
    """The report recommends what to run at each round trip time: the fastest topology, or the target alone."""
    topologies = Topology.TARGET, Topology.DISTRIBUTED
    found = findings(config(tmp_path, topologies=topologies, network=NetworkConfig((0, 200))))
    sentences = re.findall("<li>(What to run.*?)</li>", html.render(found, []))
    assert [sentence.partition(". ")[0] for sentence in sentences] == [
        "What to run at round trips of 0 ms (2.00 times): distributed sync (draft draft, gamma 3)",
        "What to run at round trips of 200 ms: the target alone",
    ]
    assert "What to run: these figures cannot say" in html.render(findings(found.config, load=BUSY), [])


def test_quantiles_of_a_hundred_and_one_values() -> None:
    found = describe([float(value) for value in reversed(range(101))])
    assert found["stddev"] == pytest.approx(29.3002, abs=1e-4)
    assert found == {f"p{at}": at for at in (25, 50, 75, 90, 95, 99)} | {
        "min": 0, "max": 100, "mean": 50, "stddev": found["stddev"]
    }  # fmt: skip
    assert (describe([2.0])["stddev"], describe([])) == (0.0, {})


SLOTS = [1, 2, 4, 6, 8, 12, 16]


@pytest.mark.parametrize(
    ("loads", "latencies", "expected"),
    [
        (SLOTS, [max(1.0, load / 6) for load in SLOTS], 6),  # six slots; a seventh client waits
        (list(np.linspace(0.0, 0.95, 20)), [1 / (1 - load) for load in np.linspace(0.0, 0.95, 20)], 0.775),  # M/M/1
        *((SLOTS[: len(it)], it, None) for it in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 9.0])),
    ],
)
def test_the_knee_is_where_the_queue_fills(
    loads: Sequence[float], latencies: Sequence[float], expected: float | None
) -> None:
    index = knee(loads, latencies)
    assert (None if index is None else loads[index]) == (expected and pytest.approx(expected, abs=0.08))


# Requests in LLMPerf's terms ------------------------------------------------------------------------------------------


def failed(code: str, failed_s: float = 0.0) -> RequestRecord:
    return RequestRecord(0, 9.0, 0, (), (), code, "no room", failed_s=failed_s)


@pytest.fixture
def alone(tmp_path: Path) -> Sample:
    """Return the sample of the target alone in the first run: two prompts, twelve tokens each."""
    return samples(config(tmp_path))[0]


def statistics_of(sample: Sample, limits: str = "") -> dict[str, object]:
    return Service.of([sample], parse_slo(limits) if limits else Slo()).statistics()


def test_figures_are_llmperf_s_with_ours_beside_them(alone: Sample, tmp_path: Path) -> None:
    """Figures have LLMPerf's names and definitions; gaps between messages are a figure of their own."""
    found = Service.of([alone], Slo()).statistics()
    assert found["ttft_s"]["p50"] == pytest.approx(PASS_S)
    assert found["end_to_end_latency_s"]["mean"] == pytest.approx(len(TOKENS) * PASS_S)
    assert found["inter_token_latency_s"]["p99"] == pytest.approx(PASS_S)
    assert found["request_output_throughput_token_per_s"]["min"] == pytest.approx(1 / PASS_S)
    assert (found["number_input_tokens"]["max"], found["number_output_tokens"]["p25"]) == (4, 12)
    assert found["num_completed_requests_per_min"] == pytest.approx(60 / (len(TOKENS) * PASS_S))
    fused = next(each for each in samples(config(tmp_path)) if is_of(Topology.FUSED, each))
    found = Service.of([fused], Slo()).statistics()
    assert found["message_gap_s"]["p50"] == pytest.approx(ROUND_S)
    assert found["inter_token_latency_s"]["p50"] == pytest.approx(3 * ROUND_S / 11)


def test_failures_are_counted_by_code_and_not_measured(alone: Sample) -> None:
    broken = replace(alone, failures=(failed("RESOURCE_EXHAUSTED"), failed("RESOURCE_EXHAUSTED"), failed("429")))
    found = statistics_of(broken)
    assert found["error_code_frequency"] == {"RESOURCE_EXHAUSTED": 2, "429": 1}
    assert (found["error_rate"], found["num_completed_requests"], found["num_requests_started"]) == (0.6, 2, 5)
    assert found["end_to_end_latency_s"] == statistics_of(alone)["end_to_end_latency_s"]


def test_goodput_counts_only_what_kept_the_limits(alone: Sample) -> None:
    mixed = replace(slowed(alone, 1.0, 2.0), failures=(failed("INTERNAL"),))
    found = statistics_of(mixed, "ttft:25ms,itl:0.025s")
    assert found["goodput_share"] == pytest.approx(1 / 3)
    assert found["goodput_requests_per_s"] == pytest.approx(1 / mixed.wall_s)
    assert statistics_of(mixed)["goodput_share"] == pytest.approx(2 / 3)
    assert str(parse_slo("ttft:25ms,itl:0.025s")) == "ttft within 25 ms, itl within 25 ms"


def test_time_spent_on_failures_counts_in_every_rate(alone: Sample) -> None:
    """The time of failed requests counts in every rate.

    Regression: rates left out the time of failed requests, so hung ones cost nothing.
    """
    broken = replace(alone, failures=(failed("DEADLINE_EXCEEDED", 120.0),) * 2)
    assert broken.wall_s == pytest.approx(alone.wall_s + 240.0)
    found = statistics_of(broken)
    assert found["num_completed_requests_per_min"] == pytest.approx(2 * 60 / broken.wall_s)
    assert found["goodput_requests_per_s"] == pytest.approx(2 / broken.wall_s)
    together = replace(broken, cell=replace(alone.cell, concurrency=2))
    assert together.wall_s == pytest.approx(9.0 + 120.0)  # from the first sent to the end of the last, which failed


# Names that LLMPerf writes, by its src/llmperf/common_metrics.py and token_benchmark_ray.py.
LLMPERF_FIGURES = (
    *("inter_token_latency_s", "ttft_s", "end_to_end_latency_s", "request_output_throughput_token_per_s"),
    *("number_input_tokens", "number_output_tokens"),
)
LLMPERF_STATISTICS = (
    *(f"quantiles_{name}" for name in ("p25", "p50", "p75", "p90", "p95", "p99")),
    *("mean", "min", "max", "stddev"),
)
LLMPERF_TOTALS = (
    *("num_requests_started", "error_rate", "number_errors", "error_code_frequency"),
    *("mean_output_throughput_token_per_s", "num_completed_requests", "num_completed_requests_per_min"),
)


def test_llmperf_s_files_have_its_names(tmp_path: Path) -> None:
    write_llmperf(findings(config(tmp_path)), tmp_path / "llmperf")
    files = sorted((tmp_path / "llmperf").iterdir())
    assert len(files) == 2 * 4 * 2 * 2  # contenders, kinds, round trip times
    summaries = [json.loads(file.read_text()) for file in files if file.stem.endswith("_summary")]
    answers = [json.loads(file.read_text()) for file in files if file.stem.endswith("_individual_responses")]
    named = {f"results_{figure}_{name}" for figure in LLMPERF_FIGURES for name in LLMPERF_STATISTICS}
    for found in summaries:
        assert {*named, *(f"results_{name}" for name in LLMPERF_TOTALS)} <= found.keys()
        assert not [value for value in found.values() if isinstance(value, dict | list)]
    for requests in answers:
        assert {*LLMPERF_FIGURES, "number_total_tokens", "error_code", "error_msg", "timestamp_ms"} == requests[
            0
        ].keys()
    # Each summary is made of its own answers.
    values = [request["ttft_s"] for request in answers[0]]
    assert summaries[0]["results_ttft_s_quantiles_p90"] == pytest.approx(float(np.quantile(values, 0.9)))


# Agreement ------------------------------------------------------------------------------------------------------------


def test_a_planted_difference_names_topology_prompt_and_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One different token in a server's answer gives exit code 1, and an error on stderr, in JSON and on the page.

    The error names the topology, the prompt and the token's position.
    """
    settings = config(
        tmp_path,
        topologies=(Topology.TARGET, Topology.FUSED),
        network=NEAR,
        workload=WorkloadConfig(TWO_PROMPTS, num_runs=1),
    )

    def plant(sample: Sample) -> Sample:
        first, second = sample.records
        wrong = replace(second, token_ids=(*TOKENS[:5], 9, *TOKENS[6:]))
        return (
            replace(sample, records=(first, wrong)) if is_of(Topology.FUSED, sample) and not sample.repeat else sample
        )

    num_requests = 2 * len(samples(settings))
    prepare_directory(settings.output)
    assert report(findings(settings), Console(stderr=True)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["same_tokens"], json.loads(line)["num_requests"]) == (True, num_requests)
    assert report(changed(settings, plant), Console(stderr=True)) == 1
    captured = capsys.readouterr()
    place = f"fused (draft draft, gamma 3), k prompt 2, output position 5: token 9 where target has {TOKENS[5]}"
    assert f"error: {place}" in captured.err
    (difference,) = json.loads(captured.out.splitlines()[-1])["differences"]
    assert difference.startswith(place)
    assert "DIFFERENT TOKENS" in (settings.output / "report.html").read_text()


def _answer(endpoint: str | None, model_id: str, text: str, *token_ids: int) -> Sample:
    contender = ALONE if endpoint is None else Contender(Topology.ENDPOINT, endpoint=endpoint)
    answer = RequestRecord(0, 0.0, 3, token_ids, (), text=text, model_id=model_id)
    return Sample(Cell(contender, "kind", 0.0, 1), 0, (answer,))


def test_only_servers_of_the_same_model_are_compared() -> None:
    """Answers are compared only if the servers' models are the same: by tokens if both send them, else by text."""
    ours, same = _answer(None, "m", "ab", 1, 2), _answer("a", "m", "ab")
    unknown, others = _answer("b", "", "zz"), [_answer("c", "n", "yy", 9), _answer("d", "n", "yx")]
    agreement = check_agreement([ours, same, unknown])
    assert (agreement.holds, agreement.not_comparable, agreement.by_text) == (True, ("b",), True)
    assert str(agreement).endswith("; not comparable, models are not known to be the same: b")
    shorter, longer = _answer("e", "m", "a", 1), _answer("f", "m", "abc")
    agreement = check_agreement([ours, _answer("a", "m", "ab", 1, 3), *others, shorter, longer])
    assert [str(it) for it in agreement.differences] == [
        "a, kind prompt 1, output position 1: token 3 where target has 2 (rtt 0 ms, concurrency 1, run 1)",
        "d, kind prompt 1, output position 1: character 'x' where c has 'y' (rtt 0 ms, concurrency 1, run 1)",
        "e, kind prompt 1, output position 1: token None where target has 2 (rtt 0 ms, concurrency 1, run 1)",
        "f, kind prompt 1, output position 2: character 'c' where target has None (rtt 0 ms, concurrency 1, run 1)",
    ]


def test_equality_is_claimed_only_when_asserted() -> None:
    strangers = [_answer("a", "", "ab"), _answer("b", "n", "ac", 1)]
    agreement = check_agreement(strangers)
    assert (agreement.is_known, agreement.holds, agreement.not_comparable) == (False, True, ("a", "b"))
    assert str(agreement) == "not comparable, models are not known to be the same: a, b"
    (difference,) = check_agreement(strangers, equal_weights=True).differences
    assert (difference.cell.contender.label, difference.position) == ("b", 1)


# Warnings -------------------------------------------------------------------------------------------------------------


def kept(sample: Sample) -> Sample:
    return replace(sample, records=tuple(replace(each, num_cached_tokens=3) for each in sample.records))


FIRST = "fused (draft draft, gamma 3), structured, rtt 0 ms, concurrency 1"
"""Name, as in reports, of the server and conditions whose sample some entries of `DOUBTS` change."""
DOUBTS: dict[str, tuple[Callable[[Sample], Sample], str]] = {
    "none": (lambda sample: sample, ""),
    "spread": (lambda it: slowed(it, 4.0) if it.repeat else it, "The machine was busy or unsteady: "),
    # A client with 32 streams read first tokens three times as late as they were sent.
    "client": (
        lambda it: replace(it, client_share=0.82 if str(it.cell) == FIRST else 0.5),
        "The client itself used 82% ",
    ),
    "half a client": (lambda sample: replace(sample, client_share=0.5), ""),
    # The baseline went on from kept prefixes, a fused graph cannot, and TTFTs stood side by side.
    "kept": (
        lambda it: kept(it) if it.cell.contender == ALONE else it,
        "target had kept up to 75% of its prompts' tokens",
    ),
    "all kept": (kept, ""),
    # Failures stood in a column of the second table alone: the page led with the speed of the answered requests.
    "failed": (
        lambda it: replace(it, failures=(failed("500", 1.0),)) if str(it.cell) == FIRST and not it.repeat else it,
        f"{FIRST}: 1 of 5 requests failed, latencies are those of others",
    ),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_doubtful_figures_have_a_warning(tmp_path: Path, name: str) -> None:
    change, expected = DOUBTS[name]
    found = changed(config(tmp_path), change)
    assert [warning.startswith(expected) for warning in json_of(found)["warnings"]] == ([True] if expected else [])
    assert expected in html.render(found, []).replace("&#39;", "'")


def test_a_busy_machine_is_named_above_all_figures(tmp_path: Path) -> None:
    """A report of a busy machine begins with a warning that has the load.

    Regression: at a load average of 24 on two cores a report had no warning, and did not name the load.
    """
    found = findings(config(tmp_path), load=BUSY)
    results, page = json_of(found), html.render(found, [])
    assert results["load"] == {"before": 24.0, "after": 23.0, "num_cores": 2, "other_cores": 1.1, "spread": 1.1}
    assert results["conditions"]["Host load"] == str(BUSY)
    (warning,) = results["warnings"]
    assert all(figure in warning for figure in ("24.0", "1.10 of 2 cores", "a factor of 1.10"))
    assert page.index(f'<p class="verdict bad">{warning}') < page.index("In short</h2>")


def test_conditions_separate_prompt_lengths_and_backends(tmp_path: Path) -> None:
    """A report has prompt lengths and backends among its conditions, which `diff` requires to be equal.

    Regression: `diff` compared runs with 10 and 1000 input tokens, or with torch and ONNX, and called the
    difference a slowdown.
    """
    prompts = ("x" * 40, Conversation(("y" * 4, "z"), "s"))
    settings = config(tmp_path, workload=WorkloadConfig((PromptSet("k", prompts),), num_runs=1))
    found = dict(conditions(settings))
    assert found["Prompts"].startswith("2 k of 6 to 40 characters; up to 96 output tokens")
    assert "Backend" not in found
    for backend, text in (
        (BackendConfig("torch", dtype="bfloat16"), "torch --dtype=bfloat16"),
        (BackendConfig("torch", "auto"), "torch, of drafts auto"),
    ):
        assert dict(conditions(replace(settings, backend=backend)))["Backend"] == text


# Files ----------------------------------------------------------------------------------------------------------------


SHOWN = {
    "tokens /s": ("tokens_per_s", 1.0),
    "TTFT ms": ("ttft_s", 1e3),
    "TPOT ms": ("tpot_s", 1e3),
    "end to end ms": ("end_to_end_s", 1e3),
    "acceptance rate": ("acceptance_rate", 1.0),
    "tokens /pass": ("mean_acceptance_length", 1.0),
    "speed-up": ("speedup", 1.0),
}
"""Columns of the page's tables of speed: heading to (field in results.json, factor from the field's unit)."""


def speeds(page: str) -> list[dict[str, str]]:
    """Return the rows of the page's tables of speed, each as a dictionary from heading to cell."""
    found = []
    for table in re.findall(r"<caption>[^<]* prompts: speed</caption>(.*?)</table>", page, re.DOTALL):
        heading, *rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table))
        found += [dict(zip(heading, row, strict=True)) for row in rows]
    return found


def test_page_csv_and_json_agree(sweep: Path) -> None:
    """Page, CSV and JSON have the same figures for each server and condition, to the digits that the page shows."""
    cells = json.loads((sweep / "results.json").read_text())["cells"]
    with (sweep / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(cells) == (1 + 4 * 2) * 2 * 2 * 3  # contenders, kinds, round trip times, loads
    for fields, cell in zip(rows, cells, strict=True):
        assert fields == {name: "" if value is None else str(value) for name, value in cell.items()}
    by_kind = [cell for kind in dict.fromkeys(it["kind"] for it in cells) for cell in cells if cell["kind"] == kind]
    for row, cell in zip(speeds((sweep / "report.html").read_text()), by_kind, strict=True):
        for heading, (name, scale) in SHOWN.items():
            text, value = row[heading], cell[name]
            assert (text == "-") is (value is None), (heading, cell)
            if value is not None:
                last_digit = 10.0 ** -len(text.partition(".")[2])
                assert float(text) == pytest.approx(value * scale, rel=1e-5, abs=0.51 * last_digit)


def test_without_matplotlib_there_are_figures_but_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without matplotlib writes the figures, without a page.

    Regression: a sweep of hours, in a Neuron environment without matplotlib, lost everything at its end.
    """
    for name in ("specdec.comparison.report.plots", "specdec.comparison.report.html"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    directory = written(findings(config(tmp_path)))
    assert sorted(file.name for file in directory.glob("r*")) == ["results.csv", "results.json"]
    assert "no report.html: it needs the package matplotlib" in caplog.text


def test_unwritable_directory_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_directory(tmp_path / "file" / "report")


FULL = Path("/dev/full")
"""Device to which nothing can be written, as to a full disk."""


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here, which only Linux has")
@pytest.mark.parametrize(("name", "refuge"), [("report.html", True), ("results.json", False)])
def test_figures_survive_a_full_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    name: str,
    refuge: bool,
) -> None:
    """Figures that cannot be written to a full disk go to another directory; without any they are printed.

    The disk is full for the file `name`; `refuge` tells whether there is another directory.

    Regression: a full disk ended a comparison without its figures.
    """
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("elsewhere" if refuge else "missing")))
    topologies = Topology.TARGET, Topology.FUSED
    found = findings(config(tmp_path, topologies=topologies, network=NEAR, workload=WorkloadConfig(ONE_KIND)))
    prepare_directory(found.config.output)
    (found.config.output / name).symlink_to(FULL)
    write = partial(in_full, found.config, "results.json", results := json_of(found), partial(write_report, found))
    if not refuge:
        with pytest.raises(SpecDecError, match="No space left on device; all figures are on stdout"):
            write()
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(results))
        return
    output = write()
    assert output.parent == tmp_path / "elsewhere"
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (output / "report.html").stat().st_size > 10_000
    (line,) = caplog.messages
    assert all(words in line for words in (str(found.config.output), "No space left on device", str(output)))


@pytest.mark.parametrize(("slowdown", "count"), [(1.0, "6 of 6 medians"), (3.0, "4 of 6 medians")])
def test_slow_cells_are_named_in_the_table_of_load(tmp_path: Path, slowdown: float, count: str) -> None:
    """The table by load says how many median speeds are at least 0.97 of the target alone's, and names the lowest.

    `slowdown` is the factor of the pool's times, and `count` is what the table says.
    """
    workload = WorkloadConfig(ONE_KIND, num_runs=2, concurrencies=(1, 4))
    settings = config(tmp_path, workload=workload, schedules=(Schedule.SYNC, Schedule.ASYNC), network=NEAR)
    found = changed(settings, lambda it: slowed(it, slowdown) if is_of(Topology.POOL, it) else it)
    text = load_table(found)
    assert count in text
    assert ("(pool, structured, concurrency" in text.replace("\n", " ")) is (slowdown > 1)
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 * (2 + len(settings.contenders))


@pytest.mark.parametrize(("place", "message"), [("gone.md#a", "cannot be read"), ("page.md#b", "has the parts a,")])
def test_a_page_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, message: str) -> None:
    """A Markdown page to write results into is checked before a comparison: it must exist and have the named part."""
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text("<!-- bench: a -->\n<!-- /bench -->\n")
    assert page_part("page.md#a") == (Path("page.md"), "a")
    with pytest.raises(ConfigError, match=message):
        page_part(place)


# Page -----------------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Parser that collects the tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def values(self, name: str, *tags: str) -> list[str]:
        """Return the values of the attribute `name` in the given tags, or in all tags if none are given."""
        return [found[name] or "" for tag, found in self.tags if name in found and (not tags or tag in tags)]


def test_page_contains_every_picture_and_asks_for_nothing(sweep: Path) -> None:
    page = _Page(text := (sweep / "report.html").read_text())
    pictures = {file.read_bytes() for file in sweep.glob("*.png")}
    assert len(pictures) == 6
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert {base64.b64decode(it.removeprefix("data:image/png;base64,")) for it in page.values("src")} == pictures
    assert not {"link", "script", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not re.search(r"@import|url\(", text)


def test_page_is_made_for_readers_without_mouse_or_sight(sweep: Path) -> None:
    """The page has landmarks, ordered headings, captions, table scopes, and texts with the figures of its pictures."""
    text = (sweep / "report.html").read_text()
    page = _Page(text)
    tags = [tag for tag, _ in page.tags]
    assert {"html", "header", "nav", "main", "section", "details"} <= set(tags)
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(deeper <= level + 1 for level, deeper in itertools.pairwise(levels))
    links = page.values("href", "a")
    assert links[0] == "#main"
    assert {link.removeprefix("#") for link in links if link} <= set(page.values("id"))
    assert tags.count("table") == tags.count("caption") > 2
    assert len(page.values("scope", "th")) == tags.count("th")
    assert all(re.search(r"structured, .*\d", shown) for shown in page.values("alt", "img"))


@pytest.mark.parametrize("name", ["ink", "dim", "link"])
@pytest.mark.parametrize("theme", [0, 1])
def test_colours_of_text_have_contrast(name: str, theme: int) -> None:
    """Texts on the page have WCAG AA's contrast of 4.5 to 1, on paper and on the table's stripes, light and dark.

    `name` is a colour of the page's style; `theme` 0 is light, 1 dark.
    """
    page = ROOT / "specdec" / "comparison" / "report" / "page.html"
    themes = page.read_text().split("prefers-color-scheme: dark")
    found = dict(re.findall(r"--(\w+): #(\w{6})", themes[theme]))
    for background in (found["paper"], found["soft"]):
        light, dark = sorted((_luminance(found[name]), _luminance(background)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_page_states_conditions_and_verdict(sweep: Path) -> None:
    """The page shows the conditions and whether all tokens are the same; each picture shows its conditions.

    Without emulated pass times, nothing is marked as emulated.
    """
    text = (sweep / "report.html").read_text()
    assert "EMULATED" not in text
    for words in ("target side: core 0", "edge: core 1", "jitter up to 2 ms", "100 Mbit/s", "same tokens: all"):
        assert words in text
    captions = re.findall("<figcaption>(.*?)</figcaption>", text, re.DOTALL)
    assert len(captions) == 6
    shown = "cores per model", "1 structured of 5 characters, 1 open_ended", "greedy", "1, 4 in flight", "0, 10 ms"
    assert all(words in caption for words in (*shown, "2 runs") for caption in captions)


def test_page_escapes_what_users_name(tmp_path: Path) -> None:
    sets = (PromptSet("<b>kind", ("text",)),)
    found = findings(config(tmp_path, network=NEAR, workload=WorkloadConfig(sets, num_runs=1)))
    assert "<b>kind" not in html.render(found, []).lower()


def test_a_report_of_endpoints_has_no_bound(tmp_path: Path) -> None:
    """A report on endpoints (servers that others run) has only figures that can be measured from outside.

    Regression: a report on endpoints had a computed highest speed, negative round trips, and topologies that were not
    started.
    """
    both = tuple(Endpoint(name, "grpc://127.0.0.1:1") for name in "ab")
    measured = findings(config(tmp_path, topologies=(), endpoints=both, network=NEAR))
    figure = tokens_over_rtt(measured)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert [axes.get_xticks().tolist() for axes in figure.axes] == [[0.0]] * len(figure.axes)
    page = html.render(measured, [])
    for words, is_there in (
        ("Servers that were running already: speed", True),
        ("times over those of a</caption>", True),
        *((text, False) for text in ("Target alone, both", "times over those of the target alone</caption>", "RTT")),
    ):
        assert (words in page) is is_there
    texts = " ".join((*speedups(measured), short_conditions(measured.config)))
    assert (" ms" in texts, "cores per model" in texts) == (False, False)
    assert speedup_by_kind(measured).axes[0].get_title() == "1 in flight, endpoints where they are"
    write_llmperf(measured, tmp_path / "llmperf")
    [first, *_] = sorted((tmp_path / "llmperf").glob("*_summary.json"))
    assert json.loads(first.read_text())["model"] == "a"
    assert first.name.startswith("a_a-")


# Pictures -------------------------------------------------------------------------------------------------------------


def test_a_faster_kind_of_prompt_is_not_cut_off(tmp_path: Path) -> None:
    """The shared y axis of a picture holds the lines of all panels.

    Regression: the upper end of the shared y axis was fixed after the first panel, so faster lines left the
    picture.
    """
    settings = config(tmp_path, workload=WorkloadConfig(TWO_KINDS, num_runs=2))
    found = changed(settings, lambda it: it if it.cell.kind == "structured" else slowed(it, 0.4))
    for axes in tokens_over_rtt(found).axes:
        low, high = axes.get_ylim()
        assert low == 0.0
        for line in axes.lines:
            assert float(np.max(np.asarray(line.get_ydata(), dtype=float), initial=low)) <= high


def test_every_draft_has_a_line(tmp_path: Path) -> None:
    """Every draft has a line in the picture.

    Regression: there were six colours, and a seventh draft was silently left out.
    """
    drafts = tuple(str(model_directory(tmp_path, f"draft{number}")) for number in range(7))
    fields = {"topologies": (Topology.TARGET, Topology.FUSED), "network": NEAR, "workload": WorkloadConfig(ONE_KIND)}
    figure = speedup_over_gamma(findings(config(tmp_path, draft_models=drafts, gammas=(1, 3), **fields)))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    drawn = [label for label in labels if label.startswith("draft: ")]
    assert drawn == [f"draft: draft{number}" for number in range(7)]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the list of all pictures that are saved from now on."""
    found: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, file: Path) -> None:
        found.append(figure)
        save(figure, file)

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def test_pictures_and_files_name_emulation_and_conditions(tmp_path: Path, saved: list[Figure]) -> None:
    """Pictures, tables and rows of emulated runs say so and name their conditions, since each may be shown alone.

    None may be taken for a measurement of this machine.
    """
    workload = WorkloadConfig(ONE_KIND, num_runs=2, concurrencies=(1, 4))
    output = written(findings(config(tmp_path, gammas=(1, 3), workload=workload, backend=EMULATED)))
    assert len(saved) >= 4
    assert {figure.get_suptitle() for figure in saved} == {LABEL}
    assert all("2 runs" in figure.legends[0].get_title().get_text() for figure in saved)
    assert (output / "report.html").read_text().count("EMULATED") >= 3
    assert json.loads((output / "results.json").read_text())["emulated"] == "target:25ms,draft:3ms"
    with (output / "results.csv").open() as file:
        assert {row["emulated"] for row in csv.DictReader(file)} == {"target:25ms,draft:3ms"}


@pytest.mark.parametrize(("load", "is_busy"), [(QUIET, False), (BUSY, True)])
def test_pictures_of_a_busy_machine_say_so(
    tmp_path: Path, saved: list[Figure], load: HostLoad, *, is_busy: bool
) -> None:
    """Each picture of a busy machine has a note that says so, and no other picture has one.

    Regression: the page alone warned, and a picture without its page showed eight times the computed highest speed.
    """
    output = written(findings(config(tmp_path), load=load))
    notes = [figure.legends[0].get_title().get_text().replace("\n", " ") for figure in saved]
    assert len(notes) >= 3
    assert not any(figure.get_suptitle() for figure in saved), "a red stamp over every picture"
    assert {"Busy or unsteady machine: repeat this" in note for note in notes} == {is_busy}
    assert "prefers-color-scheme: dark" in (output / "report.html").read_text()


def test_no_two_panels_of_latencies_have_one_title(tmp_path: Path) -> None:
    """Each panel of latencies has a title of its own, with the name of its figure.

    Regression: six panels had the title "1 in flight, round trip 0 ms", and the figure's name stood only once, below.
    """
    titles = [axes.get_title() for axes in latency_shares(findings(config(tmp_path))).axes]
    assert len(set(titles)) == len(titles) == 6


@pytest.mark.parametrize("kinds", [TWO_KINDS, THREE_KINDS])
def test_labels_of_bars_lie_on_no_bar_and_on_no_bound(tmp_path: Path, kinds: tuple[PromptSet, ...]) -> None:
    """Labels of bars overlap neither bars, lines of highest speeds nor other labels, and stay within the panel.

    Regression: white boxes at the foot of each bar hid what lay below them, and labels of narrow bars ran into one
    another.
    """
    workload = WorkloadConfig(kinds, num_runs=2)
    both = (Schedule.SYNC, Schedule.ASYNC)
    measured = findings(config(tmp_path, workload=workload, topologies=tuple(Topology), schedules=both))
    with mpl.rc_context(STYLE):
        figure = speedup_by_kind(measured)
    figure.canvas.draw()
    for axes in figure.axes:
        assert axes.texts
        bars = [bar.get_window_extent() for bar in axes.patches]
        drawn = [part for line in axes.collections for part in cast(LineCollection, line).get_segments()]
        lines = [Bbox(axes.transData.transform(part)) for part in drawn]
        for label in axes.texts:
            others = [other.get_window_extent() for other in axes.texts if other is not label]
            extent = label.get_window_extent()
            assert not any(extent.overlaps(other) for other in (*bars, *lines, *others)), label.get_text()
            assert extent.y1 <= axes.get_window_extent().y1


def test_rates_of_many_clients_are_named(tmp_path: Path) -> None:
    """The axis of a rate (tokens per second) names the number of requests in flight.

    Regression: tokens per second of --concurrency 4 had an axis with "one client".
    """
    measured = findings(config(tmp_path, workload=WorkloadConfig(ONE_KIND, num_runs=2, concurrencies=(4,))))
    assert latency_shares(measured).axes[0].get_ylabel() == "share of values\n4 in flight, round trip 0 ms"
    assert tokens_over_rtt(measured).axes[0].get_ylabel() == "tokens per second, 4 in flight"


def test_pictures_and_tables_have_one_inter_token_latency(tmp_path: Path) -> None:
    """Pictures and tables have the same inter-token latency.

    Regression: the picture showed gaps between messages, which with speculation are several times as long as those
    between tokens.
    """
    measured = findings(config(tmp_path))
    axes = next(each for each in latency_shares(measured).axes if "structured: ITL" in each.get_title())
    drawn = [float(np.max(np.asarray(line.get_xdata(), dtype=float))) for line in axes.lines]
    of_target, of_fused = (measured.services[index].values["inter_token_latency_s"] for index in (0, 1))
    assert drawn[:2] == pytest.approx([max(of_target) * 1e3, max(of_fused) * 1e3])
