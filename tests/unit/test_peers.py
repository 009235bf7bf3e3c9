"""The benchmark against other programs: how it runs them in turn, and its tables, from known times and tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from benchmarks.peers.engine import OURS, Peer, Timed
from benchmarks.peers.environment import UnavailableError
from benchmarks.peers.over_vllm import MAIN, SHOWN
from benchmarks.peers.race import Plan, Row, race
from benchmarks.peers.server import Server
from benchmarks.peers.tables import (
    goals_table,
    rates_table,
)
from benchmarks.peers.vllm import usable
from specdec.inference.config import BUNDLED_TARGET
from specdec.inference.serving.processes import free_port

SPEED = {"plain": 1.0, "draft 4": 2.0, "broken": 0.0}


class Clockwork:
    """Stand-in for another program's engine: its variants take known times, and count up from the prompt's last token.

    A variant whose speed in `SPEED` is 0 raises UnavailableError.
    """

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

    Regression: the requests had vLLM's field for token ids, which a specdec server refuses.
    """
    model = ("--model", str(BUNDLED_TARGET), "--threads", "1", "--port", str(free_port()))
    server = Server([sys.executable, *MAIN, "target", *model, "--http_port", str(port := free_port())], port)
    answers = usable(server, SHOWN)([[5, 6, 7], [8, 9]], 8)
    assert [len(answer) for answer in answers] == [8, 8]
