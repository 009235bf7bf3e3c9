"""What requests cost, in LLMPerf's terms: failures are counted and not measured, limits make goodput."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from comparison.plan.config import NetworkConfig, PromptSet, WorkloadConfig
from comparison.plan.endpoint import Endpoint
from comparison.plan.grid import Sample
from comparison.plan.record import RequestRecord
from comparison.plan.slo import Slo, parse_slo
from comparison.report.llmperf import write_llmperf
from comparison.report.service import Service
from inference.errors import ConfigError
from tests.support.samples import PASS_S, STEP_S, TOKENS, VERIFY_S, config, findings, record, samples

# What LLMPerf writes, by its src/llmperf/common_metrics.py and token_benchmark_ray.py.
LLMPERF_FIGURES = (
    "inter_token_latency_s",
    "ttft_s",
    "end_to_end_latency_s",
    "request_output_throughput_token_per_s",
    "number_input_tokens",
    "number_output_tokens",
)
LLMPERF_QUANTILES = ("p25", "p50", "p75", "p90", "p95", "p99")
LLMPERF_TOTALS = (
    *("num_requests_started", "error_rate", "number_errors", "error_code_frequency"),
    *("mean_output_throughput_token_per_s", "num_completed_requests", "num_completed_requests_per_min"),
)


def _failed(code: str) -> RequestRecord:
    return RequestRecord(0, 9.0, 0, (), (), code, "no room")


@pytest.fixture
def alone(tmp_path: Path) -> Sample:
    """The first run of the target alone: two prompts, twelve tokens each."""
    return samples(config(tmp_path))[0]


def test_figures_are_llmperf_s_with_ours_beside_them(alone: Sample) -> None:
    found = Service.of([alone], Slo()).statistics()
    assert found["ttft_s"]["p50"] == pytest.approx(PASS_S)
    assert found["end_to_end_latency_s"]["mean"] == pytest.approx(len(TOKENS) * PASS_S)
    assert found["inter_token_latency_s"]["p99"] == pytest.approx(PASS_S)
    assert found["request_output_throughput_token_per_s"]["min"] == pytest.approx(1 / PASS_S)
    assert (found["number_input_tokens"]["max"], found["number_output_tokens"]["p25"]) == (4, 12)
    assert found["num_completed_requests_per_min"] == pytest.approx(60 / (len(TOKENS) * PASS_S))


def test_tokens_together_have_one_gap(tmp_path: Path) -> None:
    """Three tokens per pass: between messages passes a round, between tokens less than a third of it."""
    measured = samples(config(tmp_path))
    fused = next(sample for sample in measured if sample.cell.contender.topology.value == "fused")
    found = Service.of([fused], Slo()).statistics()
    round_s = 3 * STEP_S + VERIFY_S
    assert found["message_gap_s"]["p50"] == pytest.approx(round_s)
    assert found["inter_token_latency_s"]["p50"] == pytest.approx(3 * round_s / 11)


def test_failures_are_counted_by_code_and_not_measured(alone: Sample) -> None:
    broken = replace(alone, failures=(_failed("RESOURCE_EXHAUSTED"), _failed("RESOURCE_EXHAUSTED"), _failed("429")))
    found, whole = (Service.of([sample], Slo()).statistics() for sample in (broken, alone))
    assert found["error_code_frequency"] == {"RESOURCE_EXHAUSTED": 2, "429": 1}
    assert (found["error_rate"], found["num_completed_requests"], found["num_requests_started"]) == (0.6, 2, 5)
    assert found["end_to_end_latency_s"] == whole["end_to_end_latency_s"]


def test_goodput_counts_only_what_kept_the_limits(alone: Sample) -> None:
    slow = record(alone.cell.contender, prompt_index=1, slowdown=2.0)
    mixed = replace(alone, records=(alone.records[0], slow), failures=(_failed("INTERNAL"),))
    limits = parse_slo("ttft:25ms,itl:0.025s")
    found = Service.of([mixed], limits).statistics()
    assert found["goodput_share"] == pytest.approx(1 / 3)
    assert found["goodput_requests_per_s"] == pytest.approx(1 / mixed.wall_s)
    assert Service.of([mixed], Slo()).statistics()["goodput_share"] == pytest.approx(2 / 3)
    assert str(limits) == "ttft within 25 ms, itl within 25 ms"


@pytest.mark.parametrize("text", ["ttft:200", "latency:2ms", "itl:5ms,itl:6ms", "", "ttft:-1ms", "ttft=5ms"])
def test_limits_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME:NUMBERms"):
        parse_slo(text)


def test_prompts_are_paired_with_the_target_alone(tmp_path: Path) -> None:
    """The second run is slower for everybody: in pairs nothing of it is left."""
    found = findings(config(tmp_path, workload=WorkloadConfig((PromptSet("k", ("a", "b")),), num_runs=3)))
    fused = found.services[1]
    ratio = found.over_target(fused, "end_to_end_latency_s")
    assert ratio is not None
    assert ratio.low == pytest.approx(ratio.high)
    assert ratio.num_pairs == 6
    assert ratio.estimate == pytest.approx((3 * STEP_S + VERIFY_S) / (3 * PASS_S))
    assert found.over_target(found.services[0], "ttft_s") is None


def test_llmperf_s_files_have_its_names(tmp_path: Path) -> None:
    write_llmperf(findings(config(tmp_path)), tmp_path / "llmperf")
    files = sorted((tmp_path / "llmperf").iterdir())
    assert len(files) == 2 * 4 * 2 * 2  # contenders, kinds, round trip times
    summaries = [json.loads(file.read_text()) for file in files if file.stem.endswith("_summary")]
    answers = [json.loads(file.read_text()) for file in files if file.stem.endswith("_individual_responses")]
    for found in summaries:
        for figure in LLMPERF_FIGURES:
            assert {f"results_{figure}_quantiles_{name}" for name in LLMPERF_QUANTILES} <= found.keys()
            assert {f"results_{figure}_{name}" for name in ("mean", "min", "max", "stddev")} <= found.keys()
        assert {f"results_{name}" for name in LLMPERF_TOTALS} <= found.keys()
        assert not [value for value in found.values() if isinstance(value, dict | list)]
    for requests in answers:
        further = {"number_total_tokens", "error_code", "error_msg", "timestamp_ms"}
        assert {*LLMPERF_FIGURES, *further} == requests[0].keys()
    # As its own summary is made of its own answers.
    values = [request["ttft_s"] for request in answers[0]]
    assert summaries[0]["results_ttft_s_quantiles_p90"] == pytest.approx(float(np.quantile(values, 0.9)))


def test_time_spent_on_failures_counts_in_every_rate(alone: Sample) -> None:
    """Of a server that hangs on every other request until its deadline, rates were taken over the time of the answers
    alone: as many requests per minute, and as much goodput, as if nothing had failed."""
    hung = replace(_failed("DEADLINE_EXCEEDED"), failed_s=120.0)
    broken = replace(alone, failures=(hung, hung))
    assert broken.wall_s == pytest.approx(alone.wall_s + 240.0)
    found = Service.of([broken], Slo()).statistics()
    assert found["num_completed_requests_per_min"] == pytest.approx(2 * 60 / broken.wall_s)
    assert found["goodput_requests_per_s"] == pytest.approx(2 / broken.wall_s)
    together = replace(broken, cell=replace(alone.cell, concurrency=2))
    assert together.wall_s == pytest.approx(9.0 + 120.0)  # from the first sent to the end of the last, which failed


def test_llmperf_files_claim_no_other_model(tmp_path: Path) -> None:
    """They had the bundled target's name, which was never asked."""
    there = config(
        tmp_path, topologies=(), endpoints=(Endpoint("a", "grpc://127.0.0.1:1"),), network=NetworkConfig((0.0,))
    )
    write_llmperf(findings(there), tmp_path / "llmperf")
    [first, *_] = sorted((tmp_path / "llmperf").glob("*_summary.json"))
    assert json.loads(first.read_text())["model"] == "a"
    assert first.name.startswith("a_a-")
