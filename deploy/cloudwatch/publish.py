"""Publish measured requests in CloudWatch: `python deploy/cloudwatch/publish.py reports/comparison/results.json`.

A source is a results.json of compare_architectures.py, or a folder of LLMPerf's results as deploy/llmperf writes them.
Each answered request is published at its own time, by Variant (endpoint, or topology) and TestCase (prompt kind), so
that CloudWatch draws curves and takes any percentile. A source without requests, such as the last line of a
comparison's log, gives one median of each cell, at the file's time. boto3 sends them, with the credentials and the
region that it finds. `--stdout` writes lines in CloudWatch's embedded metric format instead, which its log agents turn
into the same metrics, and needs no package.

Exit codes: 0; 1: CloudWatch was not reached, or refused; 2: a source cannot be published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = {
    "TTFT": ("ttft_s", "Seconds"),
    "InterTokenLatency": ("inter_token_latency_s", "Seconds"),
    "EndToEndLatency": ("end_to_end_latency_s", "Seconds"),
    "InputTokens": ("number_input_tokens", "Count"),
    "OutputTokens": ("number_output_tokens", "Count"),
    "RequestOutputThroughput": ("request_output_throughput_token_per_s", "Count/Second"),
}
"""Map from CloudWatch's name of a figure to its name in the sources, which is LLMPerf's, and its unit."""
MAX_DATA = 1000
"""Most metrics in one PutMetricData request."""


class PublishError(Exception):
    """Failure to publish some or all metrics."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Case:
    """Figures of one request of a variant on a prompt kind, or medians over its requests; METRICS has their names.

    `at_s` is in seconds since the epoch.
    """

    variant: str
    name: str
    at_s: float
    figures: dict[str, float]

    @classmethod
    def of(cls, variant: str, name: str, at_s: float, values: Mapping[str, float | None]) -> Case:
        """Return a case with those of METRICS for which `values` has a figure."""
        found = {metric: values.get(figure) for metric, (figure, _) in METRICS.items()}
        return cls(variant, name, at_s, {metric: value for metric, value in found.items() if value is not None})


def read_cases(source: Path) -> list[Case]:
    """Return the cases in a results.json or a folder of LLMPerf's results; cases without figures are left out.

    Raises:
        PublishError: `source` is neither of these, has no answered request, or has two cells of one variant and case.
    """
    read, kind = (_llmperf, "folder of LLMPerf's") if source.is_dir() else (_comparison, "results.json of a comparison")
    try:
        cases = [case for case in read(source) if case.figures]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise PublishError(f"{source} is no {kind}: {exc!r}", 2) from None
    if not cases:
        raise PublishError(f"{source} has no request that was answered", 2)
    return cases


def _comparison(file: Path) -> Iterator[Case]:
    """Yield every answered request of a results.json, or the medians of its cells if it has no requests."""
    results = json.loads(file.read_text(encoding="utf-8"))
    if results["emulated"]:
        raise PublishError(f"{file} has emulated passes ({results['emulated']}), which are no measurement", 2)
    cells = [(cell["endpoint"] or cell["topology"], cell["kind"]) for cell in results["statistics"]]
    for (variant, name), count in Counter(cells).items():
        if count > 1:
            raise PublishError(f"{file} has {count} cells of variant {variant}, test case {name}: one is expected", 2)
    if "requests" in results:
        for cell, requests in zip(cells, results["requests"], strict=True):
            yield from _answers(*cell, requests)
    else:
        at_s = file.stat().st_mtime
        for cell, statistics in zip(cells, results["statistics"], strict=True):
            medians = {figure: statistics[figure].get("p50") for figure, _ in METRICS.values()}
            yield Case.of(*cell, at_s, medians)


def _llmperf(folder: Path) -> Iterator[Case]:
    """Yield every answered request of LLMPerf's runs below a folder; their summaries name variant and test case."""
    for file in sorted(folder.rglob("*_summary.json")):
        summary = json.loads(file.read_text(encoding="utf-8"))
        answers = file.with_name(file.name.removesuffix("summary.json") + "individual_responses.json")
        requests = json.loads(answers.read_text(encoding="utf-8"))
        yield from _answers(summary["variant"], summary["test_case"], requests)


def _answers(variant: str, name: str, requests: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    for request in requests:
        if request["error_code"] is None:
            yield Case.of(variant, name, request["timestamp_ms"] / 1e3, request)


def event(namespace: str, case: Case) -> dict[str, Any]:
    """Return a case in the embedded metric format."""
    metrics = [{"Name": name, "Unit": METRICS[name][1]} for name in case.figures]
    directive = {"Namespace": namespace, "Dimensions": [["Variant", "TestCase"]], "Metrics": metrics}
    about = {"Timestamp": int(case.at_s * 1000), "CloudWatchMetrics": [directive]}
    return {"_aws": about, "Variant": case.variant, "TestCase": case.name, **case.figures}


def data(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the metrics of all cases as PutMetricData takes them."""
    return [
        {
            "MetricName": name,
            "Dimensions": [{"Name": "Variant", "Value": case.variant}, {"Name": "TestCase", "Value": case.name}],
            "Timestamp": case.at_s,
            "Value": value,
            "Unit": METRICS[name][1],
        }
        for case in cases
        for name, value in case.figures.items()
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
        raise PublishError(f"{exc}: pip install -r requirements/cloudwatch.txt, or --stdout") from None
    done = 0
    try:
        client = boto3.client("cloudwatch", config=Config(connect_timeout=10, retries={"total_max_attempts": 3}))
        for done in range(0, len(metrics), MAX_DATA):
            client.put_metric_data(Namespace=namespace, MetricData=metrics[done : done + MAX_DATA])
    except (BotoCoreError, ClientError) as exc:
        raise PublishError(f"CloudWatch has {done} of {len(metrics)} metrics: {exc}") from None


def publish(args: argparse.Namespace) -> None:
    """Read the measurements that the arguments name, and send them to CloudWatch, or print them."""
    cases = read_cases(args.results)
    if args.stdout:
        print(*(json.dumps(event(args.namespace, case)) for case in cases), sep="\n")
    else:
        put(args.namespace, metrics := data(cases))
        print(f"{len(metrics)} metrics are in namespace {args.namespace}", file=sys.stderr)


def main() -> int:
    """Run the command line; return the exit code that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="SOURCE", help="results.json, or LLMPerf's folder")
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
