"""Load of vLLM's engine cores, as they report it with their outputs, and vLLM's own metrics beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import StatLoggerBase


class _RankLoad(StatLoggerBase):
    """Load of one data-parallel rank."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.num_slots: int = vllm_config.scheduler_config.max_num_seqs
        self.num_running = 0

    def record(self, scheduler_stats: Any, *others: Any, **options: Any) -> None:
        """Take a report; some have no figures of the scheduler."""
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class CoreLoad:
    """Sum of the loads of all ranks."""

    def __init__(self) -> None:
        self._ranks: list[_RankLoad] = []

    def logger(self, vllm_config: Any, engine_index: int = 0) -> _RankLoad:
        """Return the logger of one rank; vLLM calls this for each."""
        self._ranks.append(_RankLoad(vllm_config, engine_index))
        return self._ranks[-1]

    @property
    def num_slots(self) -> int:
        return sum(rank.num_slots for rank in self._ranks)

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self._ranks)


class VllmMetrics(Collector):
    """vLLM's metrics that ours have no name for, such as `vllm:kv_cache_usage_perc`.

    Args:
        ours: our registry, which these are read beside.
    """

    def __init__(self, ours: CollectorRegistry) -> None:
        self._ours = {metric.name for metric in ours.collect()}

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield from (
            each for each in REGISTRY.collect() if each.name.startswith("vllm:") and each.name not in self._ours
        )
