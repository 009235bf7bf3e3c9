"""The profile (a file with the figures of each request): times add up, percentiles are numpy's, CSV and JSON agree."""

from __future__ import annotations

import csv
import json
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specdec.inference.commit import NOTHING_COUNTED, Commit, Counts, Timings
from specdec.inference.observe import profile as profile_module
from specdec.inference.observe.profile import PERCENTILES, Profile, figures
from specdec.inference.observe.stats import RequestStats
from specdec.inference.observe.timeline import Timeline

TIMINGS = Timings()


def request(
    *,
    started: float,
    gaps: list[float],
    timings: Timings = TIMINGS,
    counts: Counts = NOTHING_COUNTED,
    accepted: int = 3,
) -> RequestStats:
    """Return figures of a request with a commit after each of `gaps` (in s), with `accepted` of 4 draft tokens each."""
    stats = RequestStats(started=started, num_prompt_tokens=7)
    for end in np.cumsum(gaps) + started:
        stats.take(Commit(0, (7,) * (accepted + 1), 4, accepted, timings, counts=counts), at=float(end))
    return stats


def test_percentiles_are_those_of_numpy() -> None:
    gaps = [0.5, 0.1, 0.4, 0.2, 0.3]
    row = figures([request(started=1.0, gaps=[1.0, *gaps])])
    for percent in PERCENTILES:
        assert row[f"itl_p{percent}_s"] == pytest.approx(float(np.percentile(gaps, percent)))
    assert row["itl_mean_s"] == pytest.approx(0.3)
    assert figures([])["itl_p50_s"] is None


def test_parts_add_up_to_the_end_to_end_time() -> None:
    timings = Timings(queue_us=1000, compute_us=20_000, draft_us=5000, network_us=3000)
    counts = Counts(bytes_up=40, bytes_down=20)
    row = figures([request(started=1.0, gaps=[0.05, 0.04], timings=timings, counts=counts)])
    parts = [row[name] for name in ("draft_s", "verify_s", "wait_s", "network_s", "other_s")]
    assert sum(parts) == pytest.approx(row["end_to_end_s"])
    assert row["end_to_end_s"] == pytest.approx(0.09)
    assert row["other_s"] == pytest.approx(0.09 - 2 * 0.029)
    assert (row["bytes_up"], row["bytes_down"]) == (80, 40)


def test_acceptance_by_position_counts_each_place_of_a_proposal() -> None:
    stats = RequestStats()
    stats.take(Commit(0, (7,) * 3, 4, 2))
    stats.take(Commit(0, (7,) * 1, 2, 0))
    row = figures([stats])
    assert row["acceptance_rate"] == pytest.approx(2 / 6)
    assert row["acceptance_rate_by_position"] == [0.5, 0.5, 0.0, 0.0]
    assert row["mean_acceptance_length"] == pytest.approx(2.0)


def test_total_speed_is_over_wall_time() -> None:
    """The total speed is over wall time: two requests of 8 tokens at once give 16 tokens in one second, not in two."""
    both = [request(started=0.0, gaps=[0.5, 0.5]) for _ in range(2)]
    row = figures(both)
    assert row["tokens_per_s"] == pytest.approx(16.0)
    assert row["end_to_end_s"] == pytest.approx(2.0)


def test_csv_and_json_of_a_profile_agree(tmp_path: Path) -> None:
    profile = Profile("draft")
    profile.add("one, two", request(started=0.0, gaps=[0.1, 0.1], timings=Timings(compute_us=5)))
    profile.add("never answered", RequestStats())
    csv_path, json_path = profile.write(tmp_path)
    document = json.loads(json_path.read_text())
    with csv_path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["request"] for row in rows] == ["one, two"], (
        "a total among the requests would be one of them to a reader"
    )
    assert [row["request"] for row in document["requests"]] == ["one, two"]
    assert list(rows[0]) == list(document["total"])
    assert float(rows[0]["tokens_per_s"]) == pytest.approx(document["requests"][0]["tokens_per_s"])
    assert isinstance(json.loads(rows[0]["passes_by_draft_tokens"]), list)
    assert csv_path.name.startswith("performance_draft_")


def test_a_profile_without_requests_can_be_written(tmp_path: Path) -> None:
    _, json_path = Profile("target").write(tmp_path)
    assert json.loads(json_path.read_text())["total"]["num_output_tokens"] == 0


def test_runs_that_end_in_the_same_second_keep_apart(tmp_path: Path) -> None:
    """Profiles of runs that end in the same second are written to different files.

    Regression: of several clients with --profile in one folder, only the last one's figures remained.
    """
    profiles = [Profile("draft") for _ in range(3)]
    for profile in profiles:
        profile._started = 1_700_000_000.0
    written = [path for profile in profiles for path in profile.write(tmp_path)]
    assert len(set(written)) == 6
    assert all(path.is_file() for path in written)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """If a full disk cannot take a file, an error names the file, and no part of it is left.

    Regression: a full disk led to exit code 1, "No space left on device" without the file's name, and a JSON file that
    was cut off.
    """
    profile = Profile("draft")
    profile.add("one", request(started=0.0, gaps=[0.1]))
    written: dict[str, Callable[[], object]] = {
        "performance_": lambda: profile.write(tmp_path),
        "trace": lambda: Timeline("draft").write(tmp_path / "trace.json"),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # stands in for the disk
    try:
        for name, write in written.items():
            with pytest.raises(OSError, match=f"{tmp_path}/{name}.*json"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []


def test_a_long_lived_server_keeps_bounded_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server keeps the figures of a bounded number of requests.

    Regression: a server kept 100,000 requests of 200 kB each in memory.
    """
    monkeypatch.setattr(profile_module, "MAX_MESSAGES", 5)
    profile = Profile("target")
    for _ in range(10):
        profile.add("request", request(started=0.0, gaps=[0.1, 0.1]))
    assert len(profile.rows()) == 3
