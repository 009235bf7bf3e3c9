"""deploy/cloudwatch/publish.py: what CloudWatch then has, the same as lines, and errors that say what is missing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference.config import ROOT
from inference.serving.processes import free_port
from tests.deploy.cloudwatch import CloudWatch, credentials, moto, python_with_boto3, without_credentials

pytestmark = pytest.mark.deploy

SCRIPT = ROOT / "deploy" / "cloudwatch" / "publish.py"
FIGURES = {
    "TTFT": ("ttft_s", "Seconds", 0.25),
    "InterTokenLatency": ("inter_token_latency_s", "Seconds", 0.015),
    "EndToEndLatency": ("end_to_end_latency_s", "Seconds", 9.2),
    "OutputTokens": ("number_output_tokens", "Count", 600.0),
    "RequestOutputThroughput": ("request_output_throughput_token_per_s", "Count/Second", 65.2),
}


def cell(endpoint: str | None, kind: str) -> dict[str, Any]:
    """As results.json has it; figures that differ from their mean."""
    figures = {figure: {"p50": median, "mean": median + 1} for figure, _, median in FIGURES.values()}
    return {"topology": "endpoint" if endpoint else "fused", "endpoint": endpoint, "kind": kind, **figures}


def write(folder: Path, cells: Sequence[dict[str, Any]], emulated: str | None = None) -> Path:
    file = folder / "results.json"
    file.write_text(json.dumps({"emulated": emulated, "statistics": cells}))
    return file


def publish(*words: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return run(python_with_boto3(), SCRIPT, *words, environment=environment)


def run(*words: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def cloudwatch(tmp_path: Path) -> Iterator[CloudWatch]:
    with moto(tmp_path) as service:
        yield service


def test_cloudwatch_has_every_median_in_its_unit(tmp_path: Path, cloudwatch: CloudWatch) -> None:
    """A cell in which nothing was answered has no figures, an answer of one token has no gap."""
    silent = cell("SD", "a") | {figure: {} for figure, _, _ in FIGURES.values()}
    short = cell("SD", "json") | {"inter_token_latency_s": {}}
    file = write(tmp_path, [cell("Base", "a"), cell(None, "a"), silent, short])
    done = publish(file, "--namespace", "Own/Name", environment=cloudwatch.environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "14 metrics are in namespace Own/Name\n")
    for unit in ("Seconds", "Count", "Count/Second"):
        ours = {name: median for name, (_, its, median) in FIGURES.items() if its == unit}
        places = [("Base", "a"), ("fused", "a"), ("SD", "json")]
        wanted = {(*place, name): [median] for place in places for name, median in ours.items()}
        wanted.pop(("SD", "json", "InterTokenLatency"), None)
        assert cloudwatch.values("Own/Name", unit) == wanted
    assert cloudwatch.metrics("Qwen/LLMPerf") == []


def test_a_request_has_no_more_metrics_than_it_may(tmp_path: Path, cloudwatch: CloudWatch) -> None:
    file = write(tmp_path, [cell("SD", f"case{number}") for number in range(201)])
    done = publish(file, environment=cloudwatch.environment)
    assert (done.returncode, done.stderr) == (0, "1005 metrics are in namespace Qwen/LLMPerf\n")
    assert cloudwatch.log.read_text().count("POST") == 2
    assert len(cloudwatch.metrics("Qwen/LLMPerf")) == 1005


def test_lines_say_the_same(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("cells", "emulated", "complaint"),
    [
        ([{"kind": "a"}], None, "is no results.json of a comparison"),
        ([], None, "has no request that was answered"),
        ([cell("SD", "a"), cell("SD", "a")], None, "has 2 cells of variant SD, test case a"),
        ([cell("SD", "a")], "target:25ms", "has emulated passes (target:25ms)"),
    ],
)
def test_what_cannot_be_published_is_refused(
    cells: list[dict[str, Any]], emulated: str | None, complaint: str, tmp_path: Path
) -> None:
    done = publish(write(tmp_path, cells, emulated), environment=without_credentials())
    assert (done.returncode, complaint in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = publish(tmp_path / "none.json", environment=without_credentials())
    assert (done.returncode, "none.json" in done.stderr, len(done.stderr.splitlines())) == (2, True, 1)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("AWS_ACCESS_KEY_ID", "Unable to locate credentials"),
        ("AWS_DEFAULT_REGION", "You must specify a region"),
        ("", "Could not connect to the endpoint URL"),
    ],
)
def test_what_aws_needs_is_said(missing: str, complaint: str, tmp_path: Path) -> None:
    environment = credentials(f"http://127.0.0.1:{free_port()}")
    environment = {name: value for name, value in environment.items() if name != missing}
    if missing == "AWS_ACCESS_KEY_ID":
        del environment["AWS_SECRET_ACCESS_KEY"]
    done = publish(write(tmp_path, [cell("SD", "a")]), environment=environment)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"CloudWatch has 0 of 5 metrics: {complaint}" in done.stderr


def test_boto3_is_an_extra(tmp_path: Path) -> None:
    file = write(tmp_path, [cell("SD", "a")])
    done = run(python_with_boto3(), "-S", SCRIPT, file, environment=without_credentials())
    assert (done.returncode, "requirements-cloudwatch.txt, or --stdout" in done.stderr) == (1, True)
