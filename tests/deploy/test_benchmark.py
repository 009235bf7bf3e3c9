"""deploy/kubernetes/benchmark: its Job's command, against a real server with the bundled pair."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from inference.serving.processes import free_port, server_process
from tests.deploy.consistency import pod_of
from tests.deploy.kustomize import KUBERNETES, manifests, of_kind

pytestmark = pytest.mark.deploy

NAMES = {"TTFT", "InterTokenLatency", "EndToEndLatency", "OutputTokens", "RequestOutputThroughput"}


def output_of(command: Sequence[object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)


async def test_both_endpoints_are_measured_and_published(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps({"counting": "1, 2, 3,", "greeting": "Hello"}))
    http, port = free_port(), free_port()
    arguments = ["--threads", "1", "--http_port", str(http), "--port", str(port)]
    async with server_process("fused", "fused_target", *arguments, port=port):
        url = f"http://127.0.0.1:{http}"
        words = ["--cases", tmp_path / "cases.json", "--endpoints", f"Base={url} SD={url}"]
        sizes = ["--output_tokens", "6", "--num_requests", "2", "--concurrency", "2"]
        command = [sys.executable, KUBERNETES / "benchmark" / "measure.py", *words, *sizes]
        done = await asyncio.to_thread(output_of, command)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["TestCase"], line["Variant"]) for line in lines] == [
        *(("counting", "Base"), ("counting", "SD"), ("greeting", "Base"), ("greeting", "SD")),
    ]
    for line in lines:
        directive = line["_aws"]["CloudWatchMetrics"][0]
        assert directive["Namespace"] == "Qwen/LLMPerf"
        assert directive["Dimensions"] == [["Variant", "TestCase"]]
        assert {metric["Name"] for metric in directive["Metrics"]} == NAMES
        assert line["OutputTokens"] == 6
        assert 0 < line["TTFT"] <= line["EndToEndLatency"]


def test_the_job_asks_services_of_the_overlays() -> None:
    documents = manifests(KUBERNETES / "benchmark")
    endpoints = of_kind(documents, "ConfigMap")[0]["data"]["ENDPOINTS"].split()
    container = pod_of(of_kind(documents, "Job")[0])["containers"][0]
    done = output_of([sys.executable, KUBERNETES / "benchmark" / "measure.py", *container["args"], "--help"])
    assert done.returncode == 0
    for endpoint in endpoints:
        service, namespace = endpoint.partition("http://")[2].partition(":")[0].split(".")
        overlay = manifests(KUBERNETES / "overlays" / namespace.removeprefix("specdec-"))
        assert service in {each["metadata"]["name"] for each in of_kind(overlay, "Service")}
        assert overlay[0]["metadata"]["name"] == namespace
