"""Checks of the project's claims: wrong distributions are found, low speed fails, busy machines get no judgement."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scripts.claims import plan
from scripts.claims.laws import MUTANTS, mutated
from scripts.claims.servers import BAD, RANDOM, WEIGHTS, Starts, made_drafts
from scripts.claims.speed import judged
from scripts.claims.texts import num_changed, prompts
from scripts.claims.verdict import Verdict, page
from specdec.comparison.run.law import NUM_RANKS, Counts, p_value
from specdec.inference.errors import UnavailableError
from specdec.inference.workers.completing.results import Result
from tests.support.samples import BUSY, QUIET


@pytest.fixture(scope="module")
def counts() -> Counts:
    """Return counts of tokens drawn from made-up distributions, some of which hardly leave a choice."""
    rng, tokens = np.random.default_rng(1), []
    laws = [np.sort(rng.dirichlet(np.full(NUM_RANKS + 1, 0.8)))[::-1][:NUM_RANKS].tolist() for _ in range(40)]
    for number in range(4000):
        place = number % len(laws)
        tokens.append((("prompt", str(place)), 0, 0, laws[place]))
    return Counts(tokens)


@pytest.mark.release
def test_every_mutant_is_found_and_the_right_rule_passes(counts: Counts) -> None:
    values = [p_value(mutated(counts, rule)) for rule in MUTANTS.values()]
    assert values[0] >= plan.LAW_ALPHA
    assert max(values[1:]) < plan.LAW_ALPHA


def load(each: Any) -> dict[str, Any]:
    return {**asdict(each), "spread": 1.02}


def test_one_slow_cell_fails_and_a_busy_machine_is_not_judged() -> None:
    rows = [["prompts"], ["open"]]
    assert judged(rows, plan.LEAST_SPEED, load(QUIET)).holds is True
    assert judged(rows, plan.LEAST_SPEED - 0.01, load(QUIET)).holds is False
    assert judged(rows, 0.5, load(BUSY)).holds is None


def test_the_page_has_each_verdict_date_and_machine() -> None:
    verdicts = [
        Verdict("first", "1 of 2", False, [["a", "b"], ["x", "y"]]),
        Verdict("second", "0 of 2", True),
        Verdict("third", "busy", None),
    ]
    text = page(verdicts, "python -m scripts.claims", 0.4)
    assert [word in text for word in ("**FAIL**", "| pass", "| not judged", "## first", "load average 0.4")] == [
        True
    ] * 5


def test_a_text_that_differs_is_counted() -> None:
    right = [Result("a", token_ids=[1, 2]), Result("b", token_ids=[3])]
    assert num_changed(right, right) == 0
    assert num_changed([Result("a", token_ids=[1, 2]), Result("b", token_ids=[4])], right) == 1


def test_prompts_are_of_all_kinds_first() -> None:
    assert len(prompts(24)) == len(set(prompts(24))) == 24
    assert prompts(4) == prompts(24)[:4]


def test_drafts_of_other_qualities_have_other_weights(tmp_path: Path) -> None:
    made = made_drafts(tmp_path)
    good, bad, other = (load_file(made[name] / WEIGHTS) for name in ("good", BAD, RANDOM))
    assert good.keys() == bad.keys() == other.keys()
    assert not any(torch.equal(good[key], each[key]) for each in (bad, other) for key in good if good[key].std() > 0)


async def test_a_start_that_fails_is_counted() -> None:
    starts = Starts()
    with pytest.raises(UnavailableError):
        async with starts.server("target", "--model", "nowhere", port=1):
            pass
    assert (starts.tried, len(starts.faults)) == (1, 1)
    assert "nowhere" in starts.faults[0]
