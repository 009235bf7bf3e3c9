"""Profile of many requests, in two files: figures of each request as CSV, and as JSON, which also has totals.

A request's end-to-end time has five parts, which add up to it: drafting, verifying (target passes), waiting in queues,
the network between draft worker and target, and the rest, such as the network between client and server.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from specdec.inference.observe.files import write_whole
from specdec.inference.observe.stats import SOURCES, RequestStats

PERCENTILES = (25, 50, 75, 90, 95, 99)
MAX_REQUESTS = 10_000
"""Most requests of a profile."""
MAX_MESSAGES = 500_000
"""Number of messages, of all requests together, at which a profile is full; their records take some 200 MB."""
MAX_LABEL_CHARACTERS = 128


class Profile:
    """Profile of one process's requests.

    Args:
        role: role of the process, which stands in the names of the files.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._started = time.time()
        self._requests: list[tuple[str, RequestStats]] = []

    def add(self, label: str, stats: RequestStats) -> None:
        """Add a request, unless the profile is full.

        Args:
            label: name of the request's row: its id in a server's profile, its prompt in others.
            stats: its figures; they may still change until the profile is written.
        """
        num_messages = sum(len(request.arrivals) for _, request in self._requests)
        if len(self._requests) < MAX_REQUESTS and num_messages < MAX_MESSAGES:
            self._requests.append((label[:MAX_LABEL_CHARACTERS], stats))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per request that produced a token; times are in seconds."""
        return [{"request": label, **figures([stats])} for label, stats in self._requests if stats.arrivals]

    def total(self) -> dict[str, Any]:
        """Return the row for all requests together, with the columns of `rows`."""
        return {"request": "total", **figures([stats for _, stats in self._requests if stats.arrivals])}

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Write performance_<role>_<timestamp>.csv, a row per request, and .json, with the total; return their paths.

        If the name is taken, a number is added to it: several runs may end in the same second.
        """
        rows, total = self.rows(), self.total()
        document = {"role": self.role, "started": self._started, "requests": rows, "total": total}
        json_path = self._create(directory)
        write_whole(json_path, json.dumps(document, indent=2) + "\n")
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(total))
        writer.writeheader()
        writer.writerows([_flat(row) for row in rows])
        csv_path = json_path.with_suffix(".csv")
        write_whole(csv_path, table.getvalue())
        return csv_path, json_path

    def _create(self, directory: Path) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._started))
        for number in itertools.count(1):
            suffix = "" if number == 1 else f"_{number}"
            with contextlib.suppress(FileExistsError):
                path = directory / f"performance_{self.role}_{stamp}{suffix}.json"
                path.touch(exist_ok=False)
                return path
        raise AssertionError("unreachable: numbers do not end")


def figures(requests: Sequence[RequestStats]) -> dict[str, Any]:
    """Return the figures of one request, or of several together, by name of column.

    Counts and times are sums over the requests, TTFT and TPOT are medians; tokens_per_s is over the wall-clock time
    from the first request's start to the last one's end. A figure without any value is None.
    """
    num_output_tokens = sum(stats.num_output_tokens for stats in requests)
    wall_s = _wall_s(requests)
    return {
        "num_prompt_tokens": sum(stats.num_prompt_tokens for stats in requests),
        "num_cached_tokens": sum(stats.num_cached_tokens for stats in requests),
        "num_output_tokens": num_output_tokens,
        "ttft_s": _median([stats.ttft_s for stats in requests]),
        "tpot_s": _median([stats.tpot_s for stats in requests if stats.tpot_s is not None]),
        **_itl([gap for stats in requests for gap in stats.itl_s]),
        "tokens_per_s": num_output_tokens / wall_s if wall_s else None,
        **_acceptance(requests),
        **_scheduling(requests),
        **_parts(requests),
        "wall_s": wall_s,
        "bytes_up": sum(counts.bytes_up for stats in requests for counts in stats.counts),
        "bytes_down": sum(counts.bytes_down for stats in requests for counts in stats.counts),
    }


def _wall_s(requests: Sequence[RequestStats]) -> float:
    if not requests:
        return 0.0
    return max(stats.arrivals[-1][0] for stats in requests) - min(stats.started for stats in requests)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _itl(gaps: Sequence[float]) -> dict[str, float | None]:
    """Return percentiles, linearly interpolated, and the mean of the gaps between messages, in seconds."""
    values = map(float, np.percentile(gaps, PERCENTILES)) if gaps else [None] * len(PERCENTILES)
    return {**{f"itl_p{p}_s": value for p, value in zip(PERCENTILES, values, strict=True)}, "itl_mean_s": _mean(gaps)}


def _acceptance(requests: Sequence[RequestStats]) -> dict[str, Any]:
    num_draft_tokens = sum(stats.num_draft_tokens for stats in requests)
    num_accepted_tokens = sum(stats.num_accepted_tokens for stats in requests)
    num_proposals = sum(stats.num_verified_proposals for stats in requests)
    num_tokens = sum(stats.num_tokens_of_proposals for stats in requests)
    drafted = _sum_by_position([stats.drafted_by_position for stats in requests])
    accepted = _sum_by_position([stats.accepted_by_position for stats in requests])
    return {
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "acceptance_rate": num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
        **{f"acceptance_rate_{source}": _rate_of(source, requests) for source in SOURCES},
        "acceptance_rate_by_position": [kept / made for made, kept in zip_longest(drafted, accepted, fillvalue=0)],
        "mean_acceptance_length": num_tokens / num_proposals if num_proposals else None,
    }


def _rate_of(source: str, requests: Sequence[RequestStats]) -> float | None:
    num_accepted, num_rejected = (sum(stats.by_source[source, kept] for stats in requests) for kept in (True, False))
    return num_accepted / (num_accepted + num_rejected) if num_accepted + num_rejected else None


def _scheduling(requests: Sequence[RequestStats]) -> dict[str, Any]:
    """Return figures of drafting ahead of the target's answers, such as wasted tokens, by name of column.

    The means of `window` (most draft tokens past the committed ones) and of `max_branches` are over the commits that
    have a window. A figure without any value is None.
    """
    counts = [counts for stats in requests for counts in stats.counts]
    round_trips_us = [timings.round_trip_us for stats in requests for timings in stats.timings]
    return {
        "num_own_tokens": sum(stats.num_own_tokens for stats in requests),
        "passes_by_draft_tokens": _sum_by_position([stats.passes_by_draft_tokens for stats in requests]),
        "num_branch_hits": sum(count.num_branch_hits for count in counts),
        "num_wasted_tokens": sum(count.num_wasted_tokens for count in counts),
        "round_trip_s": _median([us / 1e6 for us in round_trips_us if us]),
        "window_mean": _mean([count.window for count in counts if count.window]),
        "max_branches_mean": _mean([count.max_branches for count in counts if count.window]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _sum_by_position(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _parts(requests: Sequence[RequestStats]) -> dict[str, float]:
    """Return the five parts of the requests' end-to-end time, and their sum, in seconds."""
    timings = [timings for stats in requests for timings in stats.timings]
    end_to_end_s = sum(stats.end_to_end_s for stats in requests)
    parts = {
        "draft_s": sum(timing.draft_us for timing in timings) / 1e6,
        "verify_s": sum(timing.compute_us for timing in timings) / 1e6,
        "wait_s": sum(timing.queue_us for timing in timings) / 1e6,
        "network_s": sum(timing.network_us for timing in timings) / 1e6,
    }
    return {**parts, "other_s": end_to_end_s - sum(parts.values()), "end_to_end_s": end_to_end_s}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its lists written as JSON, since a CSV cell holds one value."""
    return {
        key: json.dumps([round(v, 4) for v in value]) if isinstance(value, list) else value
        for key, value in row.items()
    }
