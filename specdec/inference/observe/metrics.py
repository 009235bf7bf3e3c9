"""Prometheus metrics of one server: vLLM's names where vLLM has the metric, names that begin with `specdec_` elsewhere.

All names, labels and buckets stand here; docs/gateway.md lists them. The number of label values is bounded: one model
name, finish reasons, status codes, draft positions below MAX_GAMMA, at most MAX_ACCOUNTS accounts, the servers that a
gateway dials now. This module knows neither gRPC nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.inference import VERSION
from specdec.inference.commit import Commit, Counts, FinishReason, Opened, Started, TextEvent, Timings, TokenEvent
from specdec.inference.model.slots import GraphMaker
from specdec.inference.observe.stats import SOURCES, by_source
from specdec.inference.request import MAX_GAMMA

# Readers such as `vllm bench serve` add up every line of a name; a creation time among them would be nonsense.
disable_created_metrics()  # type: ignore[no-untyped-call]

_MODEL = ("model_name",)
PHASES = ("draft", "verify", "queue", "network")
DIRECTIONS = ("up", "down")
# Seconds. vLLM's, and finer below 10 ms.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
WIDTH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
MAX_ACCOUNTS = 100
"""Most accounts that have a label of their own."""
OTHER_ACCOUNTS = "other accounts"
"""Label of all accounts after the first `MAX_ACCOUNTS`; no account has this name, since names have no blanks."""
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Load(Protocol):
    """Source of the numbers of requests that run and wait: an engine, or a caller that counts its requests."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class Replaceable(Protocol):
    """Files that a process reads again when they change.

    `is_stale` is True while their newest version cannot be used, so that the process goes on with an earlier one.
    """

    @property
    def is_stale(self) -> bool: ...


class Certificate(Replaceable, Protocol):
    """TLS certificate of a server, and the days until it expires; its files may be replaced while the server runs."""

    @property
    def days_left(self) -> float: ...


@runtime_checkable
class SlotLoad(Load, Protocol):
    """Load of an engine with a fixed number of slots, each of which holds one request's keys and values."""

    @property
    def num_slots(self) -> int: ...


class Upstream(Protocol):
    """Server that this process passes requests on to.

    Attributes:
        address: address of the server.
        num_ended, num_failed: requests that have ended there, and those of them that the server failed.
        busy_s: sum of the times of these requests at the server, in seconds.
        num_tokens: output tokens that the server sent.
    """

    address: str
    num_ended: int
    num_failed: int
    busy_s: float
    num_tokens: int


class _AtScrape(Collector):
    """Metrics that the function `read` yields at every scrape of Prometheus."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return self._read()


def _of_upstreams(model_name: str, servers: Callable[[], Iterable[Upstream]]) -> Iterator[Metric]:
    """Yield requests, failures, seconds and tokens of the servers that requests are passed on to.

    `servers` returns the present ones; a server that is gone has no metrics.
    """
    labels = (*_MODEL, "server")
    requests = CounterMetricFamily("specdec_upstream_requests", "Requests ended, by server.", labels=labels)
    failures = CounterMetricFamily("specdec_upstream_failures", "Those that the server failed.", labels=labels)
    seconds = CounterMetricFamily("specdec_upstream_seconds", "Time of these requests there.", labels=labels)
    tokens = CounterMetricFamily("specdec_upstream_tokens", "Output tokens, by server.", labels=labels)
    for each in servers():
        place = (model_name, each.address)
        requests.add_metric(place, each.num_ended)
        failures.add_metric(place, each.num_failed)
        seconds.add_metric(place, each.busy_s)
        tokens.add_metric(place, each.num_tokens)
    yield from (requests, failures, seconds, tokens)


class DraftingRule(Protocol):
    """What is measured to decide whether drafting pays: see `specdec.inference.scheduling.counterfactual`.

    `figures` returns tuples of a number of concurrent requests, the speed with drafts divided by the speed without for
    that many, and the seconds of a pass without drafts, None if unknown.

    Attributes:
        lost_s: seconds that drafting has cost, in tries and in passes before it was found to be slower.
    """

    lost_s: float

    def figures(self) -> Iterable[tuple[int, float, float | None]]: ...


class Drafting(Protocol):
    """Switch that is off while drafting would slow requests down: see `specdec.inference.engine.drafting.Drafting`.

    Attributes:
        is_on: True if draft models may compute.
        num_switches: number of changes of `is_on`.
    """

    is_on: bool
    num_switches: int

    @property
    def rule(self) -> DraftingRule: ...


def _of_drafting(name: str, drafting: Drafting) -> Iterator[Metric]:
    """Yield whether drafting is on, its gain by number of requests, its switches, and the seconds that tries cost.

    The gain is the speed with drafts divided by the speed without.

    Args:
        name: name of the model.
        drafting: the switch that turns drafting on and off.
    """
    labels = (*_MODEL, "streams")
    on = GaugeMetricFamily("specdec_drafting_on", "1 while draft models may compute.", labels=_MODEL)
    on.add_metric((name,), drafting.is_on)
    gain = GaugeMetricFamily("specdec_drafting_gain", "Speed with drafts over without.", labels=labels)
    quiet = GaugeMetricFamily("specdec_drafting_quiet_seconds", "Pass without drafts.", labels=labels)
    for num_sessions, value, quiet_s in drafting.rule.figures():
        gain.add_metric((name, str(num_sessions)), value)
        if quiet_s is not None:
            quiet.add_metric((name, str(num_sessions)), quiet_s)
    text = "Times that drafting began or ended."
    switches = CounterMetricFamily("specdec_drafting_switches", text, labels=_MODEL)
    switches.add_metric((name,), drafting.num_switches)
    lost = CounterMetricFamily("specdec_drafting_tries_lost_seconds", "Time that tries have cost.", labels=_MODEL)
    lost.add_metric((name,), drafting.rule.lost_s)
    yield from (on, gain, quiet, switches, lost)


class Metrics:
    """Metrics of one process, in a registry of their own.

    Args:
        model_name: name of the model that is served.
        role: role of this process, a label. A request that passes a gateway and a server is counted by both, so a sum
            over processes must select one role.
    """

    def __init__(self, model_name: str, *, role: str = "server") -> None:
        self.registry = CollectorRegistry()
        self._name = model_name
        self._add_process(role)
        self._add_tokens()
        self._add_ends()
        self._add_phases()
        self._add_run_ahead()
        self._add_latencies()

    def _add_process(self, role: str) -> None:
        ProcessCollector(registry=self.registry)
        labels = (*_MODEL, "role", "version")
        info = Gauge("specdec_server_info", "This process; always 1.", labels, registry=self.registry)
        info.labels(self._name, role, VERSION).set(1)
        self._loop_lags: deque[float] = deque([0.0], maxlen=100)
        lag = self._gauge("specdec_event_loop_lag_seconds", "How late the event loop came, at worst, in the last 10 s.")
        lag.set_function(lambda: max(self._loop_lags))

    def _add_tokens(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self._cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the slots.")
        self._cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there, and not read again.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Output tokens committed.")
        self._num_drafts = self._counter("vllm:spec_decode_num_drafts", "Proposals verified.")
        self._num_draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._num_accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        text = "Draft tokens, by who proposed them (draft, lookup, forced) and whether the target accepted them."
        sources = Counter("specdec_draft_tokens", text, (*_MODEL, "source", "accepted"), registry=self.registry)
        self._sources = {
            (source, accepted): sources.labels(self._name, source, str(accepted).lower())
            for source in SOURCES
            for accepted in (True, False)
        }
        text = "Draft tokens accepted, by place in the proposal."
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        self._accepted_per_pos = self._counter_by("position", name, text)
        self._positions = [self._accepted_per_pos.labels(self._name, "0")]  # others as they come

    def _add_ends(self) -> None:
        self._success = self._counter_by("finished_reason", "vllm:request_success", "Requests finished, by why.")
        self._failures = self._counter_by("code", "specdec_request_failures", "Requests that failed, by status.")
        labels = (*_MODEL, "account", "code")
        text = "Requests that ended, by account and status."
        self._account_requests = Counter("specdec_account_requests", text, labels, registry=self.registry)
        text = "Prompt and output tokens of these requests, by account."
        self._account_tokens = self._counter_by("account", "specdec_account_tokens", text)
        self._accounts: set[str] = set()

    def _add_phases(self) -> None:
        """Add the metrics by phase and direction; their series are kept, as a look-up costs more than counting."""
        phase_seconds = self._counter_by(
            "phase", "specdec_phase_seconds", "Time of all requests, by phase: draft, verify, queue, network."
        )
        text = "Bytes between draft worker and target, by direction: up (to the target), down."
        wire_bytes = self._counter_by("direction", "specdec_wire_bytes", text)
        self._phases = {phase: phase_seconds.labels(self._name, phase) for phase in PHASES}
        self._directions = {way: wire_bytes.labels(self._name, way) for way in DIRECTIONS}

    def _add_latencies(self) -> None:
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Gap between commits.", ITL_BUCKETS)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's later tokens.", ITL_BUCKETS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Wait before the first pass.", REQUEST_BUCKETS)
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens.", TOKEN_BUCKETS)
        self._request_output = self._histogram("vllm:request_generation_tokens", "Output tokens.", TOKEN_BUCKETS)

    def _add_run_ahead(self) -> None:
        """Add the metrics of drafting ahead of the target's answers.

        They count draft tokens that were dropped, and passes whose token began a branch, an alternative to the draft's
        best guess that was drafted too; and they show the round trip between draft worker and target.
        """
        self._own_tokens = self._counter("specdec_own_tokens", "Tokens of passes that had no draft token to verify.")
        self._wasted_tokens = self._counter("specdec_wasted_draft_tokens", "Draft tokens dropped, sent or not.")
        self._branch_hits = self._counter("specdec_branch_hits", "Passes that left the draft's chain for a branch.")
        self._pass_draft_tokens = self._histogram(
            "specdec_pass_draft_tokens", "Draft tokens that one session had verified in a pass.", WIDTH_BUCKETS
        )
        self._round_trip = self._gauge("specdec_round_trip_seconds", "Latest estimate, draft worker to target.")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _MODEL, registry=self.registry).labels(self._name)

    def _counter_by(self, label: str, name: str, text: str) -> Counter:
        return Counter(name, text, (*_MODEL, label), registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _MODEL, registry=self.registry).labels(self._name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _MODEL, registry=self.registry, buckets=buckets).labels(self._name)

    def watch(self, load: Load) -> None:
        """Add gauges of running and waiting requests, and of slots in use if `load` has slots, read from `load`."""
        running = self._gauge("vllm:num_requests_running", "Requests with a slot.")
        waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue.")
        running.set_function(lambda: load.num_running)
        waiting.set_function(lambda: load.num_waiting)
        if isinstance(load, SlotLoad):
            text = "Share of the KV slots that requests hold, 0 to 1; at 1 the next request waits."
            self._gauge("vllm:kv_cache_usage_perc", text).set_function(lambda: load.num_running / load.num_slots)

    def watch_upstream(self, servers: Callable[[], Iterable[Upstream]]) -> None:
        """Add the metrics of the servers that requests are passed on to; `servers` is called at every scrape."""
        self.registry.register(_AtScrape(partial(_of_upstreams, self._name, servers)))

    def count_account(self, account: str, code: str, num_tokens: int) -> None:
        """Count a request that has ended for its account; accounts after the first `MAX_ACCOUNTS` share one label.

        Args:
            account: name of the account.
            code: name of the gRPC status with which the request ended.
            num_tokens: number of its prompt and output tokens.
        """
        if account not in self._accounts:
            if len(self._accounts) >= MAX_ACCOUNTS:
                account = OTHER_ACCOUNTS
            self._accounts.add(account)
        self._account_requests.labels(self._name, account, code).inc()
        self._account_tokens.labels(self._name, account).inc(num_tokens)

    def watch_vocabulary(self, share: Callable[[], float]) -> None:
        """Add a gauge of the share (0 to 1) of the target's token ids that the draft can propose."""
        text = "Share of the target's token ids that the draft has, and can propose; others the target chooses alone."
        self._gauge("specdec_draft_vocabulary_share", text).set_function(share)

    def watch_drafting(self, drafting: Drafting) -> None:
        """Add metrics of the switch that turns drafting on and off."""
        self.registry.register(_AtScrape(partial(_of_drafting, self._name, drafting)))

    def watch_undrafted(self, count: Callable[[], int]) -> None:
        """Add a gauge of requests whose draft tokens never reached the target, as when a proxy splits streams."""
        text = "Requests none of whose draft tokens reached the target since the start."
        self._gauge("specdec_undrafted_requests", text).set_function(count)

    def watch_graphs(self, models: Iterable[object]) -> None:
        """Add gauges of compiled or captured graphs, if any of these backends may make such."""
        makers = [model for model in models if isinstance(model, GraphMaker)]
        if not makers:
            return
        num = self._gauge("specdec_graphs", "Graphs made for passes of fixed shapes, compiled or captured.")
        num.set_function(lambda: sum(maker.graphs.num for maker in makers))
        late = self._gauge("specdec_late_graphs", "Those made after the server was ready; requests waited for them.")
        late.set_function(lambda: sum(maker.graphs.num_late for maker in makers))

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Add a gauge of the event loop's tasks, which are counted when it is read."""
        tasks = self._gauge("specdec_event_loop_tasks", "Tasks of the event loop; without requests, a few.")
        tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    def take_loop_lag(self, lag_s: float) -> None:
        """Record by how many seconds the event loop ran a timer late."""
        self._loop_lags.append(max(0.0, lag_s))

    def watch_security(self, certificate: Certificate | None, *others: Replaceable | None) -> None:
        """Add gauges of the days until the certificate expires, and of how many arguments' new versions are unusable.

        Args:
            certificate: the server's certificate with its key; None without TLS.
            others: other files that are read again when they change; None for those that the server lacks.
        """
        if certificate is not None:
            days = self._gauge("specdec_tls_days_left", "Days until the certificate in use expires.")
            days.set_function(lambda: certificate.days_left)
        watched = [each for each in (certificate, *others) if each is not None]
        text = "How many of certificate and auth file have changed into what cannot be used; what was before is in use."
        self._gauge("specdec_security_files_stale", text).set_function(lambda: sum(each.is_stale for each in watched))

    def request(self) -> RequestMetrics:
        """Return the metrics of a request that has just arrived."""
        return RequestMetrics(self)

    def exposition(self) -> bytes:
        """Return the text of all metrics that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _count_speculation(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self._num_drafts.inc()
        self._num_draft_tokens.inc(num_draft_tokens)
        self._num_accepted_tokens.inc(num_accepted_tokens)
        num_positions = min(num_accepted_tokens, MAX_GAMMA)
        while len(self._positions) < num_positions:
            self._positions.append(self._accepted_per_pos.labels(self._name, str(len(self._positions))))
        for series in self._positions[:num_positions]:
            series.inc()

    def _count_timings(self, timings: Timings) -> None:
        times_us = (timings.draft_us, timings.compute_us, timings.queue_us, timings.network_us)
        for phase, us in zip(PHASES, times_us, strict=True):
            if us:
                self._phases[phase].inc(us / 1e6)
        if timings.round_trip_us:
            self._round_trip.set(timings.round_trip_us / 1e6)

    def _count_counts(self, counts: Counts) -> None:
        if counts.num_wasted_tokens:
            self._wasted_tokens.inc(counts.num_wasted_tokens)
        if counts.num_branch_hits:
            self._branch_hits.inc(counts.num_branch_hits)
        for direction, num_bytes in zip(DIRECTIONS, (counts.bytes_up, counts.bytes_down), strict=True):
            if num_bytes:
                self._directions[direction].inc(num_bytes)


class RequestMetrics:
    """Metrics of one request, which its events update.

    Attributes:
        num_prompt_tokens: number of tokens of the prompt.
        status: name of the gRPC status with which the request ended; empty while it runs.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._first: float | None = None
        self._last = self._arrived
        self._num_tokens = 0
        self.num_prompt_tokens = 0
        self.status = ""

    @property
    def cost(self) -> tuple[str, int, float]:
        """Return the model's name, the number of output tokens, and the seconds since arrival."""
        return self._metrics._name, self._num_tokens, time.monotonic() - self._arrived

    def take(self, event: TextEvent | TokenEvent) -> None:
        """Count an event of the request's answer that has just arrived."""
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Opened):
            self._metrics._cache_hits.inc(event.num_cached_tokens)
        elif isinstance(event, Commit):
            self._count_tokens(event)
            if event.finish_reason is not None:
                self._finish(event.finish_reason)
        elif not self.status:  # an answer without tokens has no last commit
            self._finish(event.reason)

    def _start(self, event: Started) -> None:
        self.num_prompt_tokens = event.num_prompt_tokens
        self._metrics._prompt_tokens.inc(event.num_prompt_tokens)
        self._metrics._cache_queries.inc(event.num_prompt_tokens)
        self._metrics._cache_hits.inc(event.num_cached_tokens)
        self._metrics._request_prompt.observe(event.num_prompt_tokens)

    def _count_tokens(self, event: Commit) -> None:
        metrics, num_tokens = self._metrics, len(event.token_ids)
        self._observe_arrival(event.timings)
        self._num_tokens += num_tokens
        metrics._generation_tokens.inc(num_tokens)
        metrics._pass_draft_tokens.observe(event.num_draft_tokens)
        if event.num_draft_tokens:
            metrics._count_speculation(event.num_draft_tokens, event.num_accepted_tokens)
            for source, count in by_source(event).items():
                metrics._sources[source].inc(count)
        else:
            metrics._own_tokens.inc(num_tokens)
        metrics._count_timings(event.timings)
        metrics._count_counts(event.counts)

    def _observe_arrival(self, timings: Timings) -> None:
        metrics, now = self._metrics, time.monotonic()
        if self._first is None:
            self._first = now
            metrics._ttft.observe(now - self._arrived)
            metrics._queue.observe(timings.queue_us / 1e6)
        else:
            metrics._itl.observe(now - self._last)
        self._last = now

    def _finish(self, reason: FinishReason) -> None:
        metrics, self.status = self._metrics, "OK"
        metrics._success.labels(metrics._name, reason.value).inc()
        metrics._e2e.observe(time.monotonic() - self._arrived)
        metrics._request_output.observe(self._num_tokens)
        if self._first is not None and self._num_tokens > 1:
            metrics._tpot.observe((self._last - self._first) / (self._num_tokens - 1))

    def failed(self, code: str) -> None:
        """Count the request as failed; `code` is the name of its gRPC status."""
        self.status = code
        self._metrics._failures.labels(self._metrics._name, code).inc()

    def left(self, *, late: bool = False) -> None:
        """Count the request as cancelled, or with `late` as over its deadline, unless it has finished or failed."""
        if not self.status:
            self.failed("DEADLINE_EXCEEDED" if late else "CANCELLED")
