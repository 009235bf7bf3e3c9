"""The benchmark against other programs: its race and tables, from known times and tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch

from benchmarks.page import part
from benchmarks.peers.engine import OURS, Peer, Timed
from benchmarks.peers.environment import UnavailableError
from benchmarks.peers.over_vllm import MAIN, SHOWN
from benchmarks.peers.race import Plan, Row, race
from benchmarks.peers.server import Server
from benchmarks.peers.tables import (
    SERVE,
    VLLM,
    goals_of,
    goals_table,
    joined,
    rates_table,
    rows_of,
    texts_sentence,
    thirds_table,
)
from benchmarks.peers.vllm import usable
from benchmarks.peers.walk import CLOSE, UNSURE, steps
from specdec.inference.config import BUNDLED_TARGET
from specdec.inference.serving.processes import free_port

SPEED = {"plain": 1.0, "draft 4": 2.0, "broken": 0.0}


class Clockwork:
    """Engine of another program: its variants take known times and count up from the prompt, or fail at speed 0."""

    def __init__(self, peer: Peer, tokens_per_s: float, variants: Sequence[str], step: int = 1) -> None:
        self.peer, self.variants, self._rate, self._step = peer, list(variants), tokens_per_s, step

    def generate(self, variant: str, prompts: Sequence[list[int]], num_tokens: int) -> Timed:
        if not SPEED[variant]:
            raise UnavailableError("it broke")
        answers = [[prompt[-1] + self._step * (index + 1) for index in range(num_tokens)] for prompt in prompts]
        return Timed(num_tokens * len(prompts) / (self._rate * SPEED[variant]), answers)


def raced() -> tuple[list[Row], dict[str, str]]:
    engines = [
        Clockwork(Peer(OURS, "ours"), 100.0, ["plain", "draft 4"]),
        Clockwork(Peer("slow", "slow", most_streams=1), 50.0, ["plain", "draft 4", "broken"]),
        Clockwork(Peer("other", "other"), 90.0, ["plain"], step=2),
    ]
    return race(engines, [[1], [2], [3], [4]], Plan(8, 2, (1, 4)), "float32", 3)


def as_stored(found: Sequence[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in found]


def test_a_race_has_the_rate_of_every_variant() -> None:
    rows, failures = raced()
    rates = {(row.engine, row.variant, row.num_streams): row.tokens_per_s for row in rows}
    assert rates[OURS, "plain", 1] == [100.0] * 3, "a figure for each prompt"
    assert rates[OURS, "draft 4", 4] == [200.0] * 2, "a figure for each round"
    assert ("slow", "plain", 4) not in rates, "it takes one prompt at a time"
    assert failures == {"slow, broken (float32, 1 streams)": "it broke"}


def test_neighbours_compute_in_the_middle_third_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def neighbours(number: int) -> nullcontext[None]:
        numbers.append(number)
        return nullcontext()

    monkeypatch.setattr("benchmarks.peers.race._neighbours", neighbours)
    engine = Clockwork(Peer(OURS, "ours"), 100.0, ["plain", "draft 4"])
    rows, _ = race([engine], [[1], [2]], Plan(8, 6, (2,), num_neighbours=3), "float32", 1)
    assert numbers == [0, 0, 3, 3, 0, 0]
    assert thirds_table(as_stored(rows))[1] == [[OURS, "draft 4", "2", "2.00", "2.00", "2.00"]]


def test_tables_mark_missed_goals_and_missing_figures() -> None:
    rows = as_stored(raced()[0])
    assert goals_table(rows) == (
        ["ours over", "our best", "slow", "other"],
        [
            ["float32: 1", "draft 4", "2.00 (draft 4)", "2.22 (plain)"],
            ["float32: 4", "draft 4", "-", "2.22 (plain)"],
        ],
    )
    slower = [{**row, "engine": {OURS: "slow", "slow": OURS}.get(str(row["engine"]), row["engine"])} for row in rows]
    assert goals_table(slower)[1][0][2] == r"0.50\* (draft 4)"
    header, lines = rates_table(rows)
    assert header == ["tokens/s", "float32: 1", "float32: 4"]
    assert ["slow, draft 4", "100", "-"] in lines


def test_ours_over_vllm_is_compared_with_plain_alone_and_else_with_the_draft_model() -> None:
    rates = {
        (OURS, "plain"): 94.0,
        (OURS, "1 worker, 0 ms"): 130.0,
        ("vLLM", "plain"): 100.0,
        ("vLLM", "draft_model 4"): 120.0,
        ("vLLM", "draft_model 8"): 125.0,
    }
    rows = [Row(*name, "float32", 1, [rate], 1) for name, rate in rates.items()]
    assert goals_of(VLLM)(as_stored(rows))[1] == [
        ["plain over plain (goal 0.95)", r"0.94\* (plain)"],
        ["1 worker, 0 ms over draft_model (goal 1)", "1.04 (draft_model 8)"],
    ]
    assert goals_of(VLLM)(as_stored(rows[:2]))[1][0][1] == "-"


def test_vllm_with_our_file_is_compared_with_the_same_server_without() -> None:
    rates = {("vLLM", "plain"): 100.0, ("vLLM", "defaults"): 200.0, (OURS, "plain"): 94.0, (OURS, "1 worker"): 130.0}
    rates[OURS, "defaults, 2 workers"] = 180.0
    rows = [Row(*name, "float32", 1, [rate], 1) for name, rate in rates.items()]
    assert goals_of(SERVE)(as_stored(rows))[1] == [
        ["plain over plain (goal 0.95)", r"0.94\* (plain)"],
        ["1 worker over plain", "1.30 (plain)"],
        ["defaults, 2 workers over defaults", "0.90 (defaults)"],
    ]


def test_a_server_answers_or_names_its_last_words() -> None:
    server = Server([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port := free_port())], port)
    server.wait(lambda: server.answers("/main.py"), 60.0)
    assert not server.answers("/nothing")
    assert "404" in server.log()
    with pytest.raises(UnavailableError, match="HTTP 404"):
        list(server.lines("GET", "/nothing"))
    broken = Server([sys.executable, "-c", "raise SystemExit('no such model')"], 1)
    with pytest.raises(UnavailableError, match="no such model"):
        broken.wait(lambda: False, 60.0)


def test_our_server_takes_the_requests_of_the_race_over_vllm() -> None:
    """A specdec server accepts the requests that the benchmark against vLLM sends to it.

    Regression: requests had vLLM's field for token ids, which a specdec server refuses.
    """
    model = ("--model", str(BUNDLED_TARGET), "--threads", "1", "--port", str(free_port()))
    server = Server([sys.executable, *MAIN, "target", *model, "--http_port", str(port := free_port())], port)
    answers = usable(server, SHOWN)([[5, 6, 7], [8, 9]], 8)
    assert [len(answer) for answer in answers] == [8, 8]


def test_programs_with_other_texts_than_ours_are_named() -> None:
    rows = as_stored(raced()[0])
    assert texts_sentence(rows) == "Answers with our text: float32 other 0 of 7; otherwise all."
    alike = [row for row in rows if row["engine"] != "other"]
    assert texts_sentence(alike) == "Answers with our text: all."


def test_a_page_has_every_shape_and_what_was_skipped() -> None:
    rows, failures = raced()
    run = {
        "command": "python -m benchmarks.peers --shapes tiny",
        "commit": "abc",
        "load_before": 0.0,
        "machine": {"cpu": "CPU", "cores": 2, "system": "Linux", "versions": {"numpy": "2"}},
        "versions": {"other": "1.0"},
        "plan": asdict(Plan(8, 2)) | {"num_prompts": 3},
        "skipped": failures,
        "rows": json.loads(json.dumps(as_stored(rows))),
    }
    text = part("peers", {"peers": {"tiny": [run]}})
    assert "## Shape tiny" in text
    assert "- Skipped: slow, broken (float32): it broke" in text
    assert "other 1.0" in text
    assert "float32 slow 0.50, float32 other 0.90" in text.replace("\n", " ")


def test_a_run_replaces_only_what_it_measured_again() -> None:
    first: dict[str, object] = {"commit": "old", "rows": as_stored(raced()[0])}
    second = {"commit": "new", "rows": [row for row in as_stored(raced()[0]) if row["num_streams"] == 4]}
    both = joined([first], second)
    assert [(run["commit"], {row["num_streams"] for row in run["rows"]}) for run in both] == [
        ("old", {1}),
        ("new", {4}),
    ]
    assert len(rows_of(both)) == len(raced()[0])
    assert [run["commit"] for run in joined(both, {**first, "commit": "newest"})] == ["newest"]


def test_walks_visit_every_token_and_their_drafts_are_wrong_at_a_known_rate() -> None:
    right, wrong, parts = steps(2000, UNSURE)
    token, seen = 0, set()
    for _ in range(2000):
        seen.add(token)
        token = int(right[token])
    assert token == 0
    assert len(seen) == 2000
    errs = (parts[1] > parts[0]).float().mean().item()
    assert errs == pytest.approx(UNSURE / 2, abs=0.05)
    assert sorted(set(parts.flatten().tolist())) == pytest.approx([0.0, CLOSE, 1.0])
    assert torch.equal(steps(2000, 0.0)[0], right), "target and draft walk alike"
    assert not torch.equal(right, wrong)
