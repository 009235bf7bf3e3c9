"""Tests of deploy/cloudwatch/publish.py, which sends a benchmark's figures to CloudWatch, or prints them as lines."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port
from tests.deploy.cloudwatch import CloudWatch, credentials, python_with_boto3, without_credentials

pytestmark = pytest.mark.deploy

SCRIPT = ROOT / "deploy" / "cloudwatch" / "publish.py"
FIGURES = {
    "TTFT": ("ttft_s", "Seconds", 0.25),
    "InterTokenLatency": ("inter_token_latency_s", "Seconds", 0.015),
    "EndToEndLatency": ("end_to_end_latency_s", "Seconds", 9.2),
    "InputTokens": ("number_input_tokens", "Count", 64.0),
    "OutputTokens": ("number_output_tokens", "Count", 600.0),
    "RequestOutputThroughput": ("request_output_throughput_token_per_s", "Count/Second", 65.2),
}


def cell(endpoint: str | None, kind: str) -> dict[str, Any]:
    """Return an entry of results.json for an endpoint and a kind of prompts; its medians differ from its means.

    Without an endpoint it is of a server of both models.
    """
    figures = {figure: {"p50": median, "mean": median + 1} for figure, _, median in FIGURES.values()}
    return {"topology": "endpoint" if endpoint else "fused", "endpoint": endpoint, "kind": kind, **figures}


def write(folder: Path, cells: Sequence[dict[str, Any]], emulated: str | None = None, **further: Any) -> Path:
    file = folder / "results.json"
    file.write_text(json.dumps({"emulated": emulated, "statistics": cells, **further}))
    return file


def request(sent_s: float, factor: float, error_code: str | None = None) -> dict[str, Any]:
    """Return a request as results.json has it, and LLMPerf's files of individual responses.

    It was sent at `sent_s` (Unix seconds); its figures are `factor` times the usual ones.
    """
    figures = {figure: factor * value for figure, _, value in FIGURES.values()}
    return {"timestamp_ms": round(sent_s * 1e3), "error_code": error_code, "error_msg": "", **figures}


def requests(now_s: float) -> list[dict[str, Any]]:
    """Return two completed requests, sent minutes apart before `now_s` (Unix seconds), and a failed one."""
    return [request(now_s - 900, 1.0), request(now_s - 600, 5.0), request(now_s - 300, 7.0, "TimeoutError")]


def llmperf(folder: Path, variant: str, case: str, found: Sequence[dict[str, Any]]) -> None:
    """Write the two result files of an LLMPerf run for a variant and a test case; `found` are its requests."""
    place = folder / variant / case
    place.mkdir(parents=True)
    summary = {"version": "2023-08-31", "variant": variant, "test_case": case, "results_ttft_s_quantiles_p50": 9.0}
    (place / "Qwen3-32B_64_600_summary.json").write_text(json.dumps(summary))
    (place / "Qwen3-32B_64_600_individual_responses.json").write_text(json.dumps(found))


def publish(*words: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return run(python_with_boto3(), SCRIPT, *words, environment=environment)


def run(*words: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_cloudwatch_has_every_median_in_its_unit(tmp_path: Path, cloudwatch: CloudWatch) -> None:
    """Every median in results.json is published in its unit.

    An endpoint without answers has no figures, and answers of one token have no time between tokens.
    """
    silent = cell("SD", "a") | {figure: {} for figure, _, _ in FIGURES.values()}
    short = cell("SD", "json") | {"inter_token_latency_s": {}}
    file = write(tmp_path, [cell("Base", "a"), cell(None, "a"), silent, short])
    done = publish(file, "--namespace", "Own/Name", environment=cloudwatch.environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "17 metrics are in namespace Own/Name\n")
    for unit in ("Seconds", "Count", "Count/Second"):
        ours = {name: median for name, (_, its, median) in FIGURES.items() if its == unit}
        places = [("Base", "a"), ("fused", "a"), ("SD", "json")]
        wanted = {(*place, name): [median] for place in places for name, median in ours.items()}
        wanted.pop(("SD", "json", "InterTokenLatency"), None)
        assert cloudwatch.values("Own/Name", unit) == wanted
    assert cloudwatch.metrics("Qwen/LLMPerf") == []


@pytest.mark.parametrize("source", ["results.json", "llmperf"])
def test_every_answer_is_a_datum_at_its_own_time(source: str, tmp_path: Path, cloudwatch: CloudWatch) -> None:
    """Every answer's figures are published with the time at which its request was sent.

    Regression: LLMPerf's figures stayed in the pod, and CloudWatch had one median of each test case instead of a curve.
    """
    found = requests(time.time())
    if source == "llmperf":
        llmperf(tmp_path / source, "SD", "a", found)
    else:
        write(tmp_path, [cell("SD", "a")], requests=[found])
    done = publish(tmp_path / source, environment=cloudwatch.environment)
    assert (done.returncode, done.stderr) == (0, "12 metrics are in namespace Qwen/LLMPerf\n")
    for unit in ("Seconds", "Count", "Count/Second"):
        values = {name: value for name, (_, its, value) in FIGURES.items() if its == unit}
        assert {key: sorted(found) for key, found in cloudwatch.values("Qwen/LLMPerf", unit).items()} == {
            ("SD", "a", name): pytest.approx([value, 5 * value]) for name, value in values.items()
        }


def test_a_request_has_no_more_metrics_than_it_may(tmp_path: Path, cloudwatch: CloudWatch) -> None:
    file = write(tmp_path, [cell("SD", f"case{number}") for number in range(167)])
    num_before = cloudwatch.log.read_text().count("POST / ")
    done = publish(file, environment=cloudwatch.environment)
    assert (done.returncode, done.stderr) == (0, "1002 metrics are in namespace Qwen/LLMPerf\n")
    assert cloudwatch.log.read_text().count("POST / ") == num_before + 2
    assert len(cloudwatch.metrics("Qwen/LLMPerf")) == 1002


def test_published_lines_have_the_figures_of_the_results(tmp_path: Path) -> None:
    file = write(tmp_path, [cell("Base", "a"), cell("SD", "a")])
    done = publish(file, "--stdout", environment=without_credentials())
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr, len(lines)) == (0, "", 2)
    for line, variant in zip(lines, ("Base", "SD"), strict=True):
        about = line.pop("_aws")
        (directive,) = about["CloudWatchMetrics"]
        assert about["Timestamp"] == int(file.stat().st_mtime * 1000)
        assert (directive["Namespace"], directive["Dimensions"]) == ("Qwen/LLMPerf", [["Variant", "TestCase"]])
        assert {each["Name"]: each["Unit"] for each in directive["Metrics"]} == {
            name: unit for name, (_, unit, _) in FIGURES.items()
        }
        medians = {name: median for name, (_, _, median) in FIGURES.items()}
        assert line == {"Variant": variant, "TestCase": "a", **medians}


def unedited(folder: Path) -> Path:
    """Write results as LLMPerf without this project's edits would, which lack times; return their folder."""
    llmperf(found := folder / "unedited", "SD", "a", [{"error_code": None, "ttft_s": 0.1}])
    return found


REFUSED: dict[str, Callable[[Path], Path]] = {
    "is no results.json of a comparison": lambda folder: write(folder, [{"kind": "a"}]),
    "results.json has no request that was answered": lambda folder: write(folder, []),
    "has 2 cells of variant SD, test case a": lambda folder: write(folder, [cell("SD", "a")] * 2),
    "has emulated passes (target:25ms)": lambda folder: write(folder, [cell("SD", "a")], "target:25ms"),
    "none.json": lambda folder: folder / "none.json",
    "empty has no request that was answered": lambda folder: folder / "empty",
    "is no folder of LLMPerf's: KeyError('timestamp_ms')": unedited,
}


@pytest.mark.parametrize("complaint", REFUSED)
def test_unpublishable_results_are_refused(complaint: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = publish(REFUSED[complaint](tmp_path), environment=without_credentials())
    assert (done.returncode, complaint in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("AWS_ACCESS_KEY_ID", "Unable to locate credentials"),
        ("AWS_DEFAULT_REGION", "You must specify a region"),
        ("", "Could not connect to the endpoint URL"),
    ],
)
def test_missing_needs_of_aws_are_named(missing: str, complaint: str, tmp_path: Path) -> None:
    environment = credentials(f"http://127.0.0.1:{free_port()}")
    environment = {name: value for name, value in environment.items() if name != missing}
    if missing == "AWS_ACCESS_KEY_ID":
        del environment["AWS_SECRET_ACCESS_KEY"]
    done = publish(write(tmp_path, [cell("SD", "a")]), environment=environment)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"CloudWatch has 0 of 6 metrics: {complaint}" in done.stderr


def test_boto3_is_an_extra(tmp_path: Path) -> None:
    file = write(tmp_path, [cell("SD", "a")])
    done = run(python_with_boto3(), "-S", SCRIPT, file, environment=without_credentials())
    assert (done.returncode, "requirements/cloudwatch.txt, or --stdout" in done.stderr) == (1, True)
