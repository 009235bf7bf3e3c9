"""Tests that the alerts for Prometheus and CloudWatch in deploy/ fire when they should, and use existing metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.inference.config import ROOT
from specdec.inference.observe.metrics import Metrics
from tests.deploy.kustomize import KUBERNETES, KUSTOMIZATIONS, manifests, of_kind

pytestmark = pytest.mark.deploy

FOLDER = ROOT / "deploy" / "prometheus"
RULE: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
RULES: list[dict[str, Any]] = [rule for group in RULE["spec"]["groups"] for rule in group["rules"]]


@pytest.fixture
def promtool() -> str:
    if (program := shutil.which("promtool")) is None:
        pytest.skip("there is no promtool (Debian's package prometheus has it)")
    return program


def test_alerts_call_when_they_should(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULE["spec"]))
    tests = shutil.copy(FOLDER / "alerts_test.yaml", tmp_path)
    for command in (["check", "rules", tmp_path / "rules.yaml"], ["test", "rules", tests]):
        done = subprocess.run([promtool, *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried() -> None:
    tried = re.findall(r"alertname: (\w+)", (FOLDER / "alerts_test.yaml").read_text())
    assert set(tried) == {rule["alert"] for rule in RULES if "alert" in rule}


def test_complete_jobs_raise_no_alert() -> None:
    """The alert on pods that are not ready ignores the pods of Jobs.

    Regression: a pod that has ended is not ready, so the pods of a finished benchmark fired an alert for
    ever.
    """
    [rule] = [each for each in RULES if each.get("record") == "specdec:pod_ready"]
    [excluded] = re.findall(r'pod!~"([^"]+)"', rule["expr"])
    jobs = {job["metadata"]["name"] for name in KUSTOMIZATIONS for job in of_kind(manifests(KUBERNETES / name), "Job")}
    assert jobs == {"compile", "fetch", "measure", "llmperf", "policy-check"}
    assert not [job for job in jobs if not re.fullmatch(excluded, f"{job}-abcde")]


def exported_names() -> set[str]:
    """Return the names of all metrics that a server with slots and certificates has, without suffixes like _total."""

    class Files:
        num_running, num_waiting, num_slots = 0, 0, 8
        days_left, is_stale = 9.0, False

    metrics = Metrics("model")
    metrics.watch(Files())
    metrics.watch_security(Files())
    names = re.findall(r"^# TYPE (\S+)", metrics.exposition().decode(), re.MULTILINE)
    return {name.removesuffix("_total") for name in names}


def used_names(text: str) -> set[str]:
    return {name.removesuffix("_total") for name in re.findall(r"\b(?:vllm:|specdec_)\w+", text)}


def test_alerts_ask_for_metrics_that_exist() -> None:
    used = set().union(*(used_names(rule["expr"]) for rule in RULES))
    used = {re.sub(r"_(sum|count|bucket)$", "", name) for name in used}
    assert used <= exported_names()
    assert len(used) >= 8


@pytest.mark.parametrize("file", ["amazon-cloudwatch-agent.json", "prometheus.yaml", "adot-collector.yaml"])
def test_cloudwatch_is_sent_metrics_that_exist(file: str) -> None:
    used = used_names((ROOT / "deploy" / "cloudwatch" / file).read_text())
    assert {re.sub(r"_(sum|count|bucket)$", "", name) for name in used} <= exported_names()
