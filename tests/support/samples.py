"""Invented results of `specdec compare`, for tests of its reports; no server runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.comparison.plan.config import (
    STARTED,
    ComparisonConfig,
    Contender,
    NetworkConfig,
    PromptSet,
    Topology,
    WorkloadConfig,
)
from specdec.comparison.plan.grid import Sample, walk
from specdec.comparison.plan.record import RequestRecord, Round
from specdec.comparison.report.findings import Findings, find
from specdec.inference.commit import Timings
from specdec.inference.observe.host_load import HostLoad
from specdec.inference.request import Schedule

STEP_S, PASS_S, VERIFY_S = 0.002, 0.020, 0.024
QUIET = HostLoad(before=0.1, after=1.5, num_cores=2, other_cores=0.05)
BUSY = HostLoad(before=24.0, after=23.0, num_cores=2, other_cores=1.1)
TOKENS = tuple(range(100, 112))


def config(directory: Path, **changes: Any) -> ComparisonConfig:
    """Return a comparison's configuration with empty model directories in `directory`; `changes` replace fields."""
    fields: dict[str, Any] = {
        "target_model": model_directory(directory, "target"),
        "draft_models": (str(model_directory(directory, "draft")),),
        "topologies": STARTED,
        "gammas": (3,),
        "schedules": (Schedule.SYNC,),
        "network": NetworkConfig(rtts_ms=(0.0, 10.0)),
        "workload": WorkloadConfig(
            prompt_sets=(PromptSet("structured", ("1 2 3", "a b c")), PromptSet("open_ended", ("It was",))), num_runs=2
        ),
        "usable_cores": (0, 1),
        "cores_per_machine": 1,
        "output": directory / "report",
    }
    return ComparisonConfig(**{**fields, **changes})


def model_directory(directory: Path, name: str) -> Path:
    """Make a directory whose only file is an empty config.json, which a configuration accepts as a model; return it."""
    path = directory / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    return path


def record(contender: Contender, *, rtt_ms: float = 0.0, prompt_index: int = 0, slowdown: float = 1.0) -> RequestRecord:
    """Return the record of an invented answer, the tokens TOKENS, of one compared topology.

    A target alone takes a pass per token; with a draft, two of three draft tokens are accepted in each round. All times
    are multiplied by `slowdown`.
    """
    if contender.topology is Topology.TARGET:
        shape, round_s = [(1, 0, 0)] * len(TOKENS), PASS_S
    else:
        rtt_s = rtt_ms / 1e3 if contender.topology.is_split else 0.0
        shape, round_s = [(3, 3, 2)] * (len(TOKENS) // 3), 3 * STEP_S + VERIFY_S + rtt_s
    rounds = tuple(_round(parts, (index + 1) * round_s * slowdown) for index, parts in enumerate(shape))
    return RequestRecord(prompt_index, 0.0, num_prompt_tokens=4, token_ids=TOKENS, rounds=rounds)


def _round(shape: tuple[int, int, int], arrived_s: float) -> Round:
    num_tokens, num_draft, num_accepted = shape
    pass_s = VERIFY_S if num_draft else PASS_S
    timings = Timings(compute_us=round(pass_s * 1e6), draft_us=round(num_draft * STEP_S * 1e6))
    return Round(arrived_s, num_tokens, num_draft, num_accepted, timings)


def samples(config: ComparisonConfig) -> list[Sample]:
    """Return the invented measurements of a comparison: one for each topology, condition and run.

    All topologies are 10 % slower in the second run.
    """
    prompts = {prompt_set.kind: prompt_set.prompts for prompt_set in config.workload.prompt_sets}
    found = []
    for repeat, cell in walk(config):
        records = (
            record(cell.contender, rtt_ms=cell.rtt_ms, prompt_index=index, slowdown=1.0 + 0.1 * repeat)
            for index in range(len(prompts[cell.kind]))
        )
        found.append(Sample(cell, repeat, tuple(records)))
    return found


def slowed(sample: Sample, *factors: float) -> Sample:
    """Return a measurement whose answers take `factors` times as long; the factors are used in turn and repeated."""
    cell = sample.cell
    records = (
        record(cell.contender, rtt_ms=cell.rtt_ms, prompt_index=it.prompt_index, slowdown=factor)
        for it, factor in zip(sample.records, itertools.cycle(factors), strict=False)
    )
    return replace(sample, records=tuple(records))


def changed(config: ComparisonConfig, change: Callable[[Sample], Sample]) -> Findings:
    """Return what a report finds in the measurements `samples(config)` after `change` was applied to each of them."""
    return findings(config, list(map(change, samples(config))))


def findings(config: ComparisonConfig, measured: Sequence[Sample] | None = None, load: HostLoad = QUIET) -> Findings:
    return find(config, samples(config) if measured is None else measured, duration_s=1.0, load=load)
