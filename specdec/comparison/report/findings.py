"""Results of a finished comparison, with its conditions: the source of everything in the report."""

from __future__ import annotations

import math
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec.comparison.plan.backend import AUTO, BackendConfig
from specdec.comparison.plan.config import ClientSite, ComparisonConfig, Contender, Load, PromptSet
from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.plan.machine import cpu_model
from specdec.comparison.report.agreement import Agreement, check_agreement
from specdec.comparison.report.bootstrap import Ratio
from specdec.comparison.report.service import LATENCIES, Service
from specdec.comparison.report.summary import CellSummary, Summarizer, spread_of
from specdec.inference.config import NOT_EMULATED, model_name
from specdec.inference.observe.host_load import HostLoad, busy_warning


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of a comparison, from which the whole report is written.

    Attributes:
        summaries: one per cell (a way to serve under one set of conditions) with an answered request.
        services: one per cell, even if all its requests failed.
        agreement: result of the check that all answers to a prompt have the same tokens.
        duration_s: seconds of the whole comparison, with the start of servers.
        load: load of this host during the comparison.
    """

    config: ComparisonConfig
    summaries: tuple[CellSummary, ...]
    services: tuple[Service, ...]
    agreement: Agreement
    duration_s: float
    load: HostLoad

    @property
    def busy(self) -> str:
        """Reason why figures are unreliable; empty if the machine was quiet."""
        return busy_warning(self.load, spread_of(self.summaries))

    @property
    def warnings(self) -> list[str]:
        """Sentences that warn of what makes figures unreliable."""
        names = dict.fromkeys(it.cell.contender.label for it in self.summaries if it.is_estimated)
        failed = [(it.cell, f"{it.num_failed} of {len(it.requests)}") for it in self.services if it.num_failed]
        return [
            *([self.busy] if self.busy else []),
            *self._unlike_prompts(),
            *self._busy_clients(),
            *(f"{name} does not count tokens: one is assumed in each of its messages" for name in names),
            *(f"{cell}: {share} requests failed, latencies are those of others" for cell, share in failed),
        ]

    def _busy_clients(self) -> list[str]:
        """Return a warning if the client's own CPU time may have lengthened the times that it measured, else nothing.

        The list has at most one sentence, which names the measurement with the largest share of a core.
        """
        cells = [it for it in self.summaries if it.client_share > MAX_CLIENT_SHARE]
        if not cells:
            return []
        worst = max(cells, key=lambda it: it.client_share)
        rest = f" and more than {MAX_CLIENT_SHARE:.0%} in {len(cells) - 1} other cells" if len(cells) > 1 else ""
        found = f"The client itself used {worst.client_share:.0%} of a core at {worst.cell}{rest}"
        return [f"{found}: times there contain waits of its own, so servers may be faster than shown"]

    def _unlike_prompts(self) -> list[str]:
        """Return a warning if servers took unlike shares of prompt tokens from their prefix caches, else nothing.

        The list has at most one sentence, which names the two ways to serve that differ most.
        """
        shares: dict[str, float] = defaultdict(float)
        for it in self.summaries:
            shares[it.cell.contender.label] = max(shares[it.cell.contender.label], it.cached_share)
        low, high = min(shares, key=shares.__getitem__, default=""), max(shares, key=shares.__getitem__, default="")
        if not shares or shares[high] - shares[low] < UNLIKE_SHARE:
            return []
        found = f"{high} had kept up to {shares[high]:.0%} of its prompts' tokens, {low} {shares[low]:.0%}"
        return [f"{found}: times to the first token are not alike. --no-prefix_caching on every server makes them so"]

    @property
    def conditions(self) -> list[tuple[str, str]]:
        """Conditions of the measurement, with the load of the host."""
        return measured_conditions(self.config, self.load)

    @property
    def kinds(self) -> list[str]:
        return [prompt_set.kind for prompt_set in self.config.workload.prompt_sets]

    @property
    def num_failed(self) -> int:
        """Number of failed requests of closed loops; an open loop may overload a server on purpose."""
        return sum(service.num_failed for service in self.services if service.cell.request_rate is None)

    @property
    def least_load(self) -> str:
        """Lowest measured number of requests in flight, as text; charts without an axis for the load show this load."""
        return f"{min(self.config.workload.concurrencies)} in flight"

    def at(self, cell: Cell) -> Service | None:
        """Return how a cell (a way to serve under one set of conditions) served its requests; None if not measured."""
        return next((service for service in self.services if service.cell == cell), None)

    def over_target(self, service: Service, figure: str) -> Ratio | None:
        """Return the mean ratio of a latency to the baseline's under the same conditions; see `Service.over`.

        The baseline is the target alone, or the first endpoint if there are only endpoints. None for the baseline
        itself, and if no request was answered by both.

        Args:
            figure: name of the latency, such as "ttft_s".
        """
        alone = self.at(replace(service.cell, contender=self.config.baseline))
        return None if alone is None or alone is service else service.over(alone, figure)

    def at_place(self, series: Contender, kind: str, rtt_ms: float, load: Load | None = None) -> list[CellSummary]:
        """Return the summaries of a series (a topology with its schedule, or an endpoint) at one RTT and load.

        There is one for each draft, gamma and number of branches.

        Args:
            load: default: the lowest concurrency.
        """
        wanted = (series, kind, rtt_ms, load or (min(self.config.workload.concurrencies), None))
        return [summary for summary in self.summaries if _place(summary.cell) == wanted]

    def best(self, series: Contender, kind: str, rtt_ms: float, load: Load | None = None) -> CellSummary | None:
        """Return the fastest settings of a topology with its schedule, or of an endpoint, at one RTT and load.

        Of the summaries that `at_place` returns this is the one with the most tokens/s; None if there is none.
        """
        found = self.at_place(series, kind, rtt_ms, load)
        return max(found, key=lambda summary: summary.tokens_per_s.median, default=None)

    def bests(self, series: Contender, kind: str, *, load: Load | None = None) -> list[CellSummary]:
        """Return for each round trip time, shortest first, the summary with the most tokens/s of a series.

        A series is a topology with its schedule, or an endpoint. A round trip time without a summary is left out.
        """
        found = [self.best(series, kind, rtt_ms, load) for rtt_ms in sorted(self.config.network.rtts_ms)]
        return [summary for summary in found if summary is not None]

    def served(self, series: Contender, kind: str, load: Load | None = None) -> Service | None:
        """Return how the fastest settings of a series served at the shortest round trip time; None if none did.

        A series is a topology with its schedule, or an endpoint. The fastest settings are those with the shortest
        median time from sending a request to the end of its answer.
        """
        found = self.at_place(series, kind, min(self.config.network.rtts_ms), load)
        fastest = min(found, key=lambda summary: summary.end_to_end_s, default=None)
        return None if fastest is None else self.at(fastest.cell)


def _place(cell: Cell) -> tuple[Contender, str, float, Load]:
    return cell.contender.series, cell.kind, cell.rtt_ms, (cell.concurrency, cell.request_rate)


def find(config: ComparisonConfig, samples: Sequence[Sample], duration_s: float, load: HostLoad) -> Findings:
    """Return what follows from a comparison's samples; those of the warm-up serve only to compare answers."""
    summarizer = Summarizer(config, samples)
    services = tuple(map(summarizer.service, summarizer.cells()))
    agreement = check_agreement(samples, equal_weights=config.trusts_weights, near_tie=config.workload.near_tie)
    return Findings(config, tuple(summarizer.summaries()), services, agreement, duration_s, load)


def emulation_of(config: ComparisonConfig) -> str:
    """Return the text that marks figures as emulated in every picture and table; empty if nothing is emulated."""
    emulation = config.backend.emulation
    return "" if emulation == NOT_EMULATED else f"EMULATED: passes asleep for at least {emulation}"


def round_trip(config: ComparisonConfig, rtt_ms: float) -> str:
    """Return the emulated round trip time as text; for endpoints, whose network is real, say so instead."""
    return f"round trip {rtt_ms:g} ms" if config.topologies else "endpoints where they are"


def conditions(config: ComparisonConfig) -> list[tuple[str, str]]:
    """Return the conditions of a measurement as pairs of name and readable text."""
    workload = config.workload
    prompts = ", ".join(map(_prompts, workload.prompt_sets))
    sampling = "greedy" if workload.temperature == 0 else f"temperature {workload.temperature:g}"
    emulation = emulation_of(config)
    limit = "exactly" if workload.ignore_eos else "up to"
    turns = "one architecture after the other, so what drifts favours some" if config.one_at_a_time else "interleaved"
    started = [
        *([("Passes", emulation)] if emulation else []),
        *([("Backend", backends)] if (backends := _backends(config.backend)) else []),
        ("Target model", str(config.target_model)),
        ("Draft models", ", ".join([*config.draft_models, *filter(None, [config.backend.draft_dtype])]) or "none"),
        ("Gamma", f"{_listed(config.gammas)} draft tokens per round"),
        ("Machines", _machines(config)),
        ("Network", _network(config)),
    ]
    return [
        *(started if config.topologies else []),
        *((f"Endpoint {endpoint.name}", endpoint.url) for endpoint in config.endpoints),
        ("Prompts", f"{prompts}; {limit} {workload.max_new_tokens} output tokens; {sampling}, seed {workload.seed}"),
        ("Runs", f"{workload.num_runs} of everything, {turns}, the first of each group rotating"),
        ("Load", _load(config)),
        ("Host", f"{cpu_model()}, {len(config.usable_cores)} usable cores, {platform.platform(terse=True)}"),
    ]


def measured_conditions(config: ComparisonConfig, load: HostLoad) -> list[tuple[str, str]]:
    """Return the conditions of a measurement as pairs of name and text; the last one is the load of the host."""
    return [*conditions(config), (HOST_LOAD, str(load))]


HOST_LOAD = "Host load"
"""Name of the condition that says how busy the host was during the measurement."""
UNLIKE_SHARE = 0.1
"""Difference between two servers' shares of cached prompt tokens, from which their TTFTs are not comparable."""
MAX_CLIENT_SHARE = 0.5
"""Share of a core from which the client, which has one thread for all streams, delays what it reads."""


def _prompts(prompt_set: PromptSet) -> str:
    lengths = [len(it if isinstance(it, str) else "".join((it.system, *it.turns))) for it in prompt_set.prompts]
    least, most = min(lengths), max(lengths)
    return f"{len(lengths)} {prompt_set.kind} of {least if least == most else f'{least} to {most}'} characters"


def _backends(backend: BackendConfig) -> str:
    """Return the backends with their flags; empty if the user chose none."""
    names = backend.name if backend.name == backend.draft_name else f"{backend.name}, of drafts {backend.draft_name}"
    return " ".join(() if names == AUTO else (names, *backend.model_flags))


def short_conditions(config: ComparisonConfig) -> str:
    """Return the conditions in a line or two, for a picture."""
    workload, names = config.workload, [model_name(Path(draft)) for draft in config.draft_models]
    rates = _listed(workload.request_rates)
    where = (
        f"{cpu_model()}, {config.cores_per_machine or 'all on 1'} of {len(config.usable_cores)} cores per model",
        f"{model_name(config.target_model)} with {', '.join(names) or 'no draft'}",
        f"round trip {_listed(config.network.rtts_ms)} ms",
    )
    load = f"{_listed(workload.concurrencies)} in flight" + (f", {rates} requests/s" if rates else "")
    parts = (
        *(where if config.topologies else (f"endpoints, asked from {cpu_model()}",)),
        dict(conditions(config))["Prompts"],
        *((load, f"{workload.num_runs} runs") if config.capacity is None else (f"Promised: {workload.slo}",)),
    )
    return ". ".join(parts)


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _load(config: ComparisonConfig) -> str:
    workload = config.workload
    text = f"{_listed(workload.concurrencies)} requests in flight"
    parts = [f"{text}; above 1 sent by Locust on gevent" if config.uses_locust else text]
    if workload.cell_s:
        parts.append(f"{workload.cell_s:g} s each, after {workload.cell_s / 2:g} s that do not count")
    if workload.request_rates:
        rates = _listed(workload.request_rates)
        parts.append(f"{workload.num_arrivals} that come at {rates} per second, at random (Poisson), however many wait")
    if workload.slo.limits:
        parts.append(f"goodput: {workload.slo}")
    return f"{'; '.join(parts)}; {workload.warm_up} of each kind before anything counts"


def _machines(config: ComparisonConfig) -> str:
    spare = _listed(config.spare_cores)
    rest = f"cores {spare} are free for them" if spare else "no core is left over, so they share these"
    num_threads = max(1, config.cores_per_machine)
    shared = "" if config.cores_per_machine else " Both are the same core, on which drafts starve."
    return (
        f"{'; '.join(map(str, config.machines))}.{shared} Target-only and fused run on the target side alone, "
        f"distributed and pool have their draft pinned to the edge; {num_threads} thread(s) per model, one per core. "
        f"Client and network proxy are not pinned: {rest}."
    )


def _network(config: ComparisonConfig) -> str:
    network = config.network
    parts = [f"round trip {_listed(network.rtts_ms)} ms between edge and target side"]
    if network.jitter_ms:
        parts.append(f"jitter up to {network.jitter_ms:g} ms per direction")
    if network.bandwidth_mbps is not None:
        parts.append(f"{network.bandwidth_mbps:g} Mbit/s per direction")
    return f"{', '.join(parts)}, made by a proxy on loopback. {_SITES[network.client_site]}"


_SITES = {
    ClientSite.EDGE: "The thin client sits at the edge: for target-only and fused the round trip lies between client "
    "and server (it adds to TTFT only); for distributed between draft and target; for pool in both places.",
    ClientSite.TARGET: "The thin client sits beside the target: for target-only and fused no link is slow; for "
    "distributed it lies between client and draft and between draft and target; for pool between draft and target.",
}


def json_of(findings: Findings) -> dict[str, Any]:
    """Return the content of results.json; times are in seconds."""
    agreement = findings.agreement
    return {
        "emulated": str(findings.config.backend.emulation) or None,
        "same_tokens": agreement.holds if agreement.is_known else None,
        "not_comparable": list(agreement.not_comparable),
        "warnings": findings.warnings,
        "num_requests": agreement.num_requests,
        "differences": [str(difference) for difference in agreement.differences],
        "near_ties": [str(difference) for difference in agreement.near_ties],
        "duration_s": round(findings.duration_s, 1),
        "conditions": dict(findings.conditions),
        "load": {**asdict(findings.load), "spread": spread_of(findings.summaries)},
        "cells": cells_of(findings),
        "statistics": [_statistics(findings, service) for service in findings.services],
        "requests": [[_rounded(request) for request in service.requests] for service in findings.services],
    }


def cells_of(findings: Findings) -> list[dict[str, Any]]:
    """Return the rows of results.csv, one per way to serve and set of conditions, if a request was answered."""
    emulated = str(findings.config.backend.emulation) or None
    return [{**row(summary), "emulated": emulated} for summary in findings.summaries]


def _statistics(findings: Findings, service: Service) -> dict[str, Any]:
    """Return the distributions of a service's figures, and in "over_target" its latencies over the baseline's."""
    over = {name: findings.over_target(service, name) for name in LATENCIES}
    ratios = {name: _rounded(asdict(ratio)) | {"verdict": str(ratio)} for name, ratio in over.items() if ratio}
    return {**place(service.cell), **_rounded(service.statistics()), "over_target": ratios}


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, also of nested dicts, with floats rounded to six significant digits.

    An infinite value becomes None, as does NaN.
    """
    rounded: dict[str, Any] = {}
    for name, value in values.items():
        rounded[name] = _rounded(value) if isinstance(value, dict) else value
        if isinstance(value, float):
            rounded[name] = float(f"{value:.6g}") if math.isfinite(value) else None
    return rounded


PLACE = (
    *("topology", "endpoint", "schedule", "draft", "gamma", "branches"),
    *("kind", "rtt_ms", "concurrency", "request_rate"),
)
"""Names of the values that identify a measurement in results: first how was served, then under which conditions."""


def place(cell: Cell) -> dict[str, Any]:
    """Return the values that identify a cell (a way to serve under one set of conditions), by the names in `PLACE`."""
    contender = cell.contender
    schedule = contender.schedule.value if contender.schedule else None
    values = (
        *(contender.topology.value, contender.endpoint, schedule, contender.draft_name, contender.gamma),
        *(contender.branches, cell.kind, cell.rtt_ms, cell.concurrency or None, cell.request_rate),
    )
    return dict(zip(PLACE, values, strict=True))


def row(summary: CellSummary) -> dict[str, Any]:
    """Return a summary as a row of results.csv and an object of results.json; times are in seconds."""
    speedup, costs, tokens_per_s = summary.speedup, summary.costs, summary.tokens_per_s
    figures = {
        "num_requests": summary.num_requests,
        "tokens_per_s": tokens_per_s.median,
        "tokens_per_s_min": tokens_per_s.low,
        "tokens_per_s_max": tokens_per_s.high,
        "ttft_s": summary.ttft_s,
        "tpot_s": summary.tpot_s,
        "end_to_end_s": summary.end_to_end_s,
        "acceptance_rate": summary.acceptance_rate,
        "drafting_share": summary.drafting_share,
        "acceptance_probability": summary.alpha,
        "mean_acceptance_length": summary.mean_acceptance_length,
        "wire_bytes_per_token": summary.wire_bytes_per_token,
        "speedup": speedup and speedup.median,
        "speedup_min": speedup and speedup.low,
        "speedup_max": speedup and speedup.high,
        "bound_tokens_per_s": summary.bound_tokens_per_s,
        "bound_speedup": summary.bound_speedup,
        "percent_of_bound": summary.percent_of_bound,
        "draft_step_s": costs.step_s or None,
        "pass_s": costs.pass_s,
        "verify_s": costs.verify_s,
        "client_share": summary.client_share,
    }
    return {**place(summary.cell), **_rounded(figures)}
