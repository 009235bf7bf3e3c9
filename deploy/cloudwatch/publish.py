"""Publish a comparison in CloudWatch: `python deploy/cloudwatch/publish.py reports/comparison/results.json`.

The metrics are medians over the requests of each Variant (endpoint, or topology) and TestCase (prompt kind). boto3
sends them, with the credentials and the region that it finds. `--stdout` writes lines in CloudWatch's embedded metric
format instead, which its log agents turn into the same metrics, and needs Python alone.

Exit codes: 0; 1: CloudWatch was not reached, or refused; 2: the file cannot be published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = {
    "TTFT": ("ttft_s", "Seconds"),
    "InterTokenLatency": ("inter_token_latency_s", "Seconds"),
    "EndToEndLatency": ("end_to_end_latency_s", "Seconds"),
    "OutputTokens": ("number_output_tokens", "Count"),
    "RequestOutputThroughput": ("request_output_throughput_token_per_s", "Count/Second"),
}
"""Map from CloudWatch's name of a figure to its name in `statistics` of results.json, and its unit."""
MAX_DATA = 1000
"""Most metrics in one PutMetricData request."""


class PublishError(Exception):
    """Failure to publish some or all metrics."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Case:
    """Figures of one variant on one prompt kind; `medians` by the names of METRICS."""

    variant: str
    name: str
    medians: dict[str, float]


def read_cases(file: Path) -> list[Case]:
    """Return the cases of a results.json that have answered requests.

    Raises:
        PublishError: the file is no results.json, has no measured case, or has two of one variant and test case.
    """
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        emulated, cells = results["emulated"], [_case(cell) for cell in results["statistics"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise PublishError(f"{file} is no results.json of a comparison: {exc!r}", 2) from None
    if emulated:
        raise PublishError(f"{file} has emulated passes ({emulated}), which are no measurement", 2)
    cases = [case for case in cells if case.medians]
    if not cases:
        raise PublishError(f"{file} has no request that was answered", 2)
    (first, count), *_ = Counter((case.variant, case.name) for case in cases).most_common()
    if count > 1:
        raise PublishError(f"{file} has {count} cells of variant {first[0]}, test case {first[1]}: one is expected", 2)
    return cases


def _case(cell: dict[str, Any]) -> Case:
    medians = {name: cell[figure].get("p50") for name, (figure, _) in METRICS.items()}
    known = {name: value for name, value in medians.items() if value is not None}
    return Case(cell["endpoint"] or cell["topology"], cell["kind"], known)


def event(namespace: str, case: Case, at_s: float) -> dict[str, Any]:
    """Return a case in the embedded metric format; `at_s` is in seconds since the epoch."""
    metrics = [{"Name": name, "Unit": METRICS[name][1]} for name in case.medians]
    directive = {"Namespace": namespace, "Dimensions": [["Variant", "TestCase"]], "Metrics": metrics}
    about = {"Timestamp": int(at_s * 1000), "CloudWatchMetrics": [directive]}
    return {"_aws": about, "Variant": case.variant, "TestCase": case.name, **case.medians}


def data(cases: Sequence[Case], at_s: float) -> list[dict[str, Any]]:
    """Return the metrics of all cases as PutMetricData takes them."""
    return [
        {
            "MetricName": name,
            "Dimensions": [{"Name": "Variant", "Value": case.variant}, {"Name": "TestCase", "Value": case.name}],
            "Timestamp": at_s,
            "Value": value,
            "Unit": METRICS[name][1],
        }
        for case in cases
        for name, value in case.medians.items()
    ]


def put(namespace: str, metrics: Sequence[dict[str, Any]]) -> None:
    """Put metrics, at most MAX_DATA in a request.

    Raises:
        PublishError: boto3, its credentials or its region are missing, or CloudWatch refuses.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError as exc:
        raise PublishError(f"{exc}: pip install -r requirements-cloudwatch.txt, or --stdout") from None
    done = 0
    try:
        client = boto3.client("cloudwatch", config=Config(connect_timeout=10, retries={"total_max_attempts": 3}))
        for done in range(0, len(metrics), MAX_DATA):
            client.put_metric_data(Namespace=namespace, MetricData=metrics[done : done + MAX_DATA])
    except (BotoCoreError, ClientError) as exc:
        raise PublishError(f"CloudWatch has {done} of {len(metrics)} metrics: {exc}") from None


def publish(args: argparse.Namespace) -> None:
    """Read the results file and publish it, with the file's modification time."""
    cases = read_cases(args.results)
    at_s = args.results.stat().st_mtime
    if args.stdout:
        print(*(json.dumps(event(args.namespace, case, at_s)) for case in cases), sep="\n")
    else:
        put(args.namespace, metrics := data(cases, at_s))
        print(f"{len(metrics)} metrics are in namespace {args.namespace}", file=sys.stderr)


def main() -> int:
    """Run the command line; return the exit code that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="FILE", help="results.json of compare_architectures.py")
    parser.add_argument("--namespace", default="Qwen/LLMPerf", metavar="NAME", help="of the metrics (%(default)s)")
    parser.add_argument("--stdout", action="store_true", help="write lines of the embedded metric format instead")
    try:
        publish(parser.parse_args())
    except PublishError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
