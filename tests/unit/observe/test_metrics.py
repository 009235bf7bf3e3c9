"""Counters and histograms of the metrics have the names that vLLM uses, and a limited number of time series."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.inference import VERSION
from specdec.inference.caller import ANYBODY, Caller, request_context
from specdec.inference.commit import (
    Commit,
    Counts,
    Delta,
    Finished,
    FinishReason,
    Opened,
    OwnDrafts,
    Started,
    TextEvent,
    Timings,
)
from specdec.inference.config import MEASURED
from specdec.inference.engine.drafting import Drafting
from specdec.inference.errors import CapacityError
from specdec.inference.observe.metrics import MAX_ACCOUNTS, OTHER_ACCOUNTS, Metrics
from specdec.inference.observe.profile import Profile
from specdec.inference.request import MAX_GAMMA
from specdec.inference.scheduling.quiet import Pass
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.completion import CompletionRequest

TIMINGS = Timings(queue_us=1_000, compute_us=2_000, draft_us=500, network_us=100)
COUNTS = Counts(bytes_up=30, bytes_down=20)


class Completer:
    """Completer that yields an answer of two passes, then raises `error` if it is set, else ends the answer."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        yield Started(5, 1, num_cached_tokens=3)
        yield Delta(0, (1, 2, 3), 4, 2, TIMINGS, counts=COUNTS, text="abc")
        yield Delta(3, (4,), 0, 0, TIMINGS, counts=COUNTS, text="d")
        if self.error is not None:
            raise self.error
        yield Finished(FinishReason.STOP)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the values of all time series, keyed by (name, values of the labels other than the model's name)."""
    return {
        (
            sample.name,
            ",".join(value for key, value in sorted(sample.labels.items()) if key != "model_name"),
        ): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


async def drain(completer: SupervisedCompleter) -> None:
    async for _ in completer.complete(CompletionRequest("x")):
        pass


async def test_a_request_is_counted_under_vllms_names() -> None:
    metrics = Metrics("tiny")
    await drain(SupervisedCompleter(Completer(), Observer(metrics)))
    found = samples(metrics)
    expected = {
        "vllm:prompt_tokens_total": 5,
        "vllm:prefix_cache_queries_total": 5,
        "vllm:prefix_cache_hits_total": 3,
        "vllm:generation_tokens_total": 4,
        "vllm:spec_decode_num_drafts_total": 1,
        "vllm:spec_decode_num_draft_tokens_total": 4,
        "vllm:spec_decode_num_accepted_tokens_total": 2,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 1,
        "vllm:request_time_per_output_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_queue_time_seconds_sum": 0.001,
        "vllm:request_prompt_tokens_sum": 5,
        "vllm:request_generation_tokens_sum": 4,
    }
    assert {name: found[name, ""] for name in expected} == expected
    positions = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(2)]
    assert positions == [1, 1]
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["specdec_phase_seconds_total", "verify"] == pytest.approx(0.004)
    assert found["specdec_wire_bytes_total", "up"] == 60
    assert not any(name.endswith("_created") for name, _ in found), "vllm bench would add it to the count"


async def test_failures_and_clients_that_leave() -> None:
    metrics = Metrics("tiny")
    completer = SupervisedCompleter(Completer(CapacityError("full", retry_after_s=1.0)), Observer(metrics))
    metrics.watch(completer)
    with pytest.raises(CapacityError):
        await drain(completer)
    events = SupervisedCompleter(Completer(), Observer(metrics)).complete(CompletionRequest("x"))
    await anext(events)
    await events.aclose()
    found = samples(metrics)
    assert found["specdec_request_failures_total", "RESOURCE_EXHAUSTED"] == 1
    assert found["specdec_request_failures_total", "CANCELLED"] == 1
    assert found["vllm:num_requests_running", ""] == found["vllm:num_requests_waiting", ""] == 0


class Slots:
    """Stand-in for an engine with four slots, in which three requests run and one waits."""

    num_running, num_waiting, num_slots = 3, 1, 4


def test_an_engine_reports_its_cache_use() -> None:
    metrics = Metrics("tiny", role="target")
    metrics.watch(Slots())
    found = samples(metrics)
    assert found["vllm:kv_cache_usage_perc", ""] == 0.75
    assert (found["vllm:num_requests_running", ""], found["vllm:num_requests_waiting", ""]) == (3, 1)
    assert found["specdec_server_info", f"target,{VERSION}"] == 1


async def test_a_gateway_has_no_cache() -> None:
    metrics = Metrics("tiny", role="gateway")
    metrics.watch(SupervisedCompleter(Completer(), Observer(metrics)))
    assert ("vllm:kv_cache_usage_perc", "") not in samples(metrics)


def test_the_process_is_measured_too() -> None:
    found = samples(Metrics("tiny"))
    assert found["process_resident_memory_bytes", ""] > 2**20
    assert found["process_cpu_seconds_total", ""] > 0


def test_a_draft_workers_session_counts_at_the_target() -> None:
    metrics, profile = Metrics("tiny"), Profile("target")
    with request_context(ANYBODY, "id-1"), Observer(metrics, profile).request() as session:
        session.take(Started(5, 1))
        session.take(Opened(num_cached_tokens=4))
        session.take(Commit(5, (1, 2), 3, 1, TIMINGS))
        session.take(Commit(7, (3,), 2, 0, TIMINGS, FinishReason.LENGTH))
    found = samples(metrics)
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 5
    assert found["vllm:request_success_total", "length"] == 1
    assert (found["vllm:prefix_cache_hits_total", ""], profile.total()["num_cached_tokens"]) == (4, 4)
    assert [(row["request"], row["num_prompt_tokens"], row["num_output_tokens"]) for row in profile.rows()] == [
        ("id-1", 5, 3)
    ]


def test_there_are_at_most_max_gamma_draft_positions() -> None:
    """A server that reports more than MAX_GAMMA accepted tokens in a pass adds no further time series."""
    metrics = Metrics("tiny")
    record = metrics.request()
    record.take(Commit(0, (7,) * 300, 300, 300))
    positions = [labels for name, labels in samples(metrics) if name.endswith("per_pos_total")]
    assert len(positions) == MAX_GAMMA


def test_draft_tokens_are_counted_by_who_proposed_them() -> None:
    metrics = Metrics("tiny")
    request = metrics.request()
    request.take(Commit(0, (1, 2, 3), 4, 2))
    request.take(Commit(3, (4,), 3, 0, own=OwnDrafts(num_lookup_tokens=3)))
    request.take(Commit(4, (5, 6, 7), 2, 2, own=OwnDrafts(num_forced_tokens=1, num_forced_accepted=1)))
    found = samples(metrics).items()
    by_source = {labels: value for (name, labels), value in found if name == "specdec_draft_tokens_total" and value}
    assert by_source == {"true,draft": 3, "false,draft": 2, "false,lookup": 3, "true,forced": 1}


async def test_requests_count_for_the_account_that_sent_them() -> None:
    """Requests count for the account that sent them, even if they are refused.

    Token counts would not show an account that floods a full queue, since such an account gets hardly any tokens.
    """
    metrics = Metrics("tiny")
    full = Completer(CapacityError("full", retry_after_s=1.0))
    with request_context(Caller("gateway", speaks_for_others=True, user="alice"), "1"):
        await drain(SupervisedCompleter(Completer(), Observer(metrics)))
    with request_context(Caller("bob"), "2"), pytest.raises(CapacityError):
        await drain(SupervisedCompleter(full, Observer(metrics)))
    await drain(SupervisedCompleter(Completer(), Observer(metrics)))  # of a server without an auth file
    found = samples(metrics)
    accounts = {labels: value for (name, labels), value in found.items() if name == "specdec_account_requests_total"}
    assert accounts == {"alice,OK": 1, "bob,RESOURCE_EXHAUSTED": 1}
    assert found["specdec_account_tokens_total", "alice"] == 5 + 4


def test_a_bounded_number_of_accounts_has_time_series() -> None:
    """Only a bounded number of accounts has time series of its own, since a gateway may name any number of users."""
    metrics = Metrics("tiny")
    for number in range(2 * MAX_ACCOUNTS):
        metrics.count_account(f"user-{number}", "OK", 7)
    metrics.count_account("user-0", "OK", 7)
    accounts = {
        label: value for (name, label), value in samples(metrics).items() if name.endswith("account_tokens_total")
    }
    assert len(accounts) == MAX_ACCOUNTS + 1
    assert accounts["user-0"] == 14
    assert accounts[OTHER_ACCOUNTS] == 7 * MAX_ACCOUNTS


def test_what_holding_drafts_has_measured_is_seen() -> None:
    metrics, drafting = Metrics("m"), Drafting(MEASURED)
    metrics.watch_drafting(drafting)
    for number in range(40):
        each = Pass(4, 4.0, 0, 0, has_drafts=False, seconds=0.01)
        drafting.rule.passed(each, is_quiet=True, now=0.01 * number)
    drafting.switch(is_on=False)
    text = metrics.exposition().decode()
    assert 'specdec_drafting_on{model_name="m"} 0.0' in text
    assert 'specdec_drafting_gain{model_name="m",streams="4"} 1.0' in text
    assert 'specdec_drafting_quiet_seconds{model_name="m",streams="4"} 0.01' in text
    assert 'specdec_drafting_switches_total{model_name="m"} 1.0' in text
    assert 'specdec_drafting_tries_lost_seconds_total{model_name="m"} 0.0' in text
