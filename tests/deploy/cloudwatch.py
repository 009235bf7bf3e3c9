"""A stand-in for AWS on this machine, by the library moto, and functions that read the metrics published to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from specdec.inference.serving.processes import free_port

START_S = 60.0
QUERY = """
import boto3, datetime, json, sys
namespace, unit = sys.argv[1:]
client = boto3.client("cloudwatch")
pages = client.get_paginator("list_metrics").paginate(Namespace=namespace)
listed = {json.dumps(metric): metric for page in pages for metric in page["Metrics"]}
metrics = list(listed.values())  # moto lists a metric once for each datum
stats = [{"Metric": metric, "Period": 60, "Stat": "Average", "Unit": unit} for metric in metrics]
hour, now = datetime.timedelta(hours=1), datetime.datetime.now(datetime.timezone.utc)
found = client.get_metric_data(
    MetricDataQueries=[{"Id": f"m{i}", "MetricStat": stat} for i, stat in enumerate(stats[:500])],
    StartTime=now - hour, EndTime=now + hour,
)["MetricDataResults"]
print(json.dumps([metrics, [each["Values"] for each in found]]))
"""
"""Program that prints all metrics of a CloudWatch namespace, and the values of the first 500 in a given unit."""


def python_with_boto3() -> Path:
    """Return the path of a Python with boto3: that of the environment that has the moto_server on PATH."""
    server = shutil.which("moto_server")
    assert server is not None, "moto_server is missing: make manifests installs it"
    return Path(server).with_name("python")


@dataclass(frozen=True, slots=True)
class CloudWatch:
    """Stand-in for CloudWatch: environment variables that make boto3 call it, and the log file of its requests."""

    environment: dict[str, str]
    log: Path

    def reset(self) -> None:
        """Delete all metrics, buckets and repositories in the stand-in."""
        httpx.post(f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/reset", timeout=START_S).raise_for_status()

    def metrics(self, namespace: str) -> list[dict[str, Any]]:
        """Return all metrics of a namespace, as CloudWatch's call ListMetrics describes them."""
        return list(self._ask(namespace, "None")[0])

    def values(self, namespace: str, unit: str) -> dict[tuple[str, str, str], list[float]]:
        """Return the values published in a namespace with this unit, by (variant, test case, metric)."""
        metrics, values = self._ask(namespace, unit)
        return {_place(metric): found for metric, found in zip(metrics, values, strict=True) if found}

    def _ask(self, namespace: str, unit: str) -> Any:
        command = [str(python_with_boto3()), "-c", QUERY, namespace, unit]
        return json.loads(subprocess.run(command, env=self.environment, capture_output=True, check=True).stdout)


def _place(metric: dict[str, Any]) -> tuple[str, str, str]:
    dimensions = {each["Name"]: each["Value"] for each in metric["Dimensions"]}
    assert dimensions.keys() == {"Variant", "TestCase"}
    return dimensions["Variant"], dimensions["TestCase"], metric["MetricName"]


def credentials(url: str) -> dict[str, str]:
    """Return environment variables for boto3: a region, made-up keys, and `url` as the address of AWS."""
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    return without_credentials() | keys | {"AWS_ENDPOINT_URL": url}


def without_credentials() -> dict[str, str]:
    """Return this process's environment variables without any settings for boto3, nor files or services for them."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**ours, **nowhere, "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def moto(folder: Path) -> Iterator[CloudWatch]:
    """Run moto, a stand-in for AWS, until the block ends; its log is a file in `folder`."""
    port, log = free_port(), folder / "moto.log"
    command: Sequence[str] = ["moto_server", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            _wait(port, log)
            yield CloudWatch(credentials(f"http://127.0.0.1:{port}"), log)
        finally:
            server.terminate()


def _wait(port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(log.read_text())
