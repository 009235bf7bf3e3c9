"""Results in LLMPerf's two files (ray-project/llmperf, results version 2023-08-31).

There is a pair of files for each cell, which is a way to serve under one set of conditions.

Names and nesting are LLMPerf's, so that its readers work unchanged. Only inter_token_latency_s differs: it is (end to
end - TTFT) / (output tokens - 1), as in AWS's patch for Neuron, while LLMPerf's own also counts the TTFT.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from specdec.comparison.plan.config import ComparisonConfig
from specdec.comparison.report.findings import Findings, place
from specdec.comparison.report.service import QUANTILES, Service

VERSION = "2023-08-31"
_OWN = ("run", "prompt")
_QUANTILES = {f"p{quantile}" for quantile in QUANTILES}


def write_llmperf(findings: Findings, directory: Path) -> None:
    """Write NAME_summary.json and NAME_individual_responses.json for each way to serve and set of conditions."""
    directory.mkdir(exist_ok=True)
    for service in findings.services:
        asked = service.cell.contender.endpoint or findings.config.target_model.name
        name = re.sub(r"[^\w-]+", "-", f"{asked}_{service.cell}")
        answers = [_without(request, _OWN) for request in service.requests]
        _write(directory / f"{name}_summary.json", summary(findings.config, service, f"{name}_summary"))
        _write(directory / f"{name}_individual_responses.json", answers)


def summary(config: ComparisonConfig, service: Service, name: str) -> dict[str, Any]:
    """Return the content of a summary file with flat names, such as `results_ttft_s_quantiles_p50`.

    Args:
        name: name of the file without its ending, which the content repeats.
    """
    statistics = _without(service.statistics(), ("message_gap_s", "goodput_requests_per_s", "goodput_share"))
    lengths = {
        f"{kind}_{side}_tokens": statistics[f"number_{side}_tokens"].get(kind)
        for side in ("input", "output")
        for kind in ("mean", "stddev")
    }
    results = {figure: _nested(value) for figure, value in statistics.items()}
    return {
        "version": VERSION,
        "name": name,
        "model": service.cell.contender.endpoint or str(config.target_model),
        **lengths,
        "num_concurrent_requests": service.cell.concurrency or None,
        "additional_sampling_params_temperature": config.workload.temperature,
        **_flat({"results": {**results, "error_code_frequency": str(dict(service.errors))}}),
        **place(service.cell),
        "timestamp": int(time.time()),
    }


def _nested(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    quantiles = {name: value[name] for name in value if name in _QUANTILES}
    return {"quantiles": quantiles, **_without(value, quantiles)}


def _without(values: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}_") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
