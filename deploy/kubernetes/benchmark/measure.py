"""Ask several services the same, one test case after the other, and print what was measured.

Needs Python alone. For each endpoint and case one line of JSON on stdout, in CloudWatch's embedded metric format: the
medians of TTFT, InterTokenLatency, EndToEndLatency (seconds), OutputTokens and RequestOutputThroughput (tokens/s), by
Variant and TestCase. Where nobody reads such lines, they are just lines. A request that fails ends the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

UNITS = {
    "TTFT": "Seconds",
    "InterTokenLatency": "Seconds",
    "EndToEndLatency": "Seconds",
    "OutputTokens": "Count",
    "RequestOutputThroughput": "Count/Second",
}
TIMEOUT_S = 180.0
"""Between two bytes of an answer."""


def events(base: str, prompt: str, output_tokens: int) -> Iterator[dict[str, Any]]:
    """The chunks of one streamed completion, greedy and exactly so many tokens long unless the context ends it."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{base}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                chunk = json.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    raise RuntimeError(f"{base}: {chunk['error']}")
                yield chunk


def one_request(base: str, prompt: str, output_tokens: int) -> dict[str, float]:
    """What one request took, by the names of UNITS."""
    started, first, tokens = time.monotonic(), None, 0
    for chunk in events(base, prompt, output_tokens):
        if first is None and chunk["choices"]:
            first = time.monotonic()
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    if first is None or not tokens:
        raise RuntimeError(f"{base}: an answer without tokens")
    ended = time.monotonic()
    return {
        "TTFT": first - started,
        "InterTokenLatency": (ended - first) / max(1, tokens - 1),
        "EndToEndLatency": ended - started,
        "OutputTokens": tokens,
        "RequestOutputThroughput": tokens / (ended - started),
    }


def medians(base: str, prompt: str, args: argparse.Namespace) -> dict[str, float]:
    """Of all requests of one case, `concurrency` at once; after one that warms up."""
    one_request(base, prompt, args.output_tokens)
    with ThreadPoolExecutor(args.concurrency) as pool:
        ran = [pool.submit(one_request, base, prompt, args.output_tokens) for _ in range(args.num_requests)]
        results = [each.result() for each in ran]
    return {name: statistics.median(result[name] for result in results) for name in UNITS}


def metric_line(namespace: str, variant: str, case: str, values: dict[str, float]) -> str:
    """One event of CloudWatch's embedded metric format."""
    metrics = [{"Name": name, "Unit": unit} for name, unit in UNITS.items()]
    directive = {"Namespace": namespace, "Dimensions": [["Variant", "TestCase"]], "Metrics": metrics}
    about = {"Timestamp": int(time.time() * 1000), "CloudWatchMetrics": [directive]}
    return json.dumps({"_aws": about, "Variant": variant, "TestCase": case, **values})


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--endpoints", required=True, help="VARIANT=URL of each service, separated by spaces")
    parser.add_argument("--cases", type=Path, required=True, help="JSON object: prompts by the name of their case")
    parser.add_argument("--output_tokens", type=int, default=600, help="of every answer (%(default)s)")
    parser.add_argument("--num_requests", type=int, default=8, help="of each case (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at once (%(default)s)")
    parser.add_argument("--namespace", default="Qwen/LLMPerf", help="of the metrics (%(default)s)")
    args = parser.parse_args()
    for case, prompt in json.loads(args.cases.read_text(encoding="utf-8")).items():
        for endpoint in args.endpoints.split():
            variant, _, base = endpoint.partition("=")
            print(metric_line(args.namespace, variant, case, medians(base, prompt, args)), flush=True)


if __name__ == "__main__":
    main()
