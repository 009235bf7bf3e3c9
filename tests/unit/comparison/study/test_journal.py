"""A study with one server at a time starts each server once; after an interruption it continues from its journal."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.comparison.plan.config import ComparisonConfig, Topology
from specdec.comparison.plan.grid import Sample
from specdec.comparison.study import laboratory
from specdec.comparison.study.flags import StudyConfig, parse_study
from specdec.comparison.study.journal import FILE
from specdec.comparison.study.laboratory import conduct_study
from specdec.inference.errors import UnavailableError
from tests.support.samples import model_directory, samples


class Servers:
    """Stand-in for servers: records each start as (draft, gamma), and fails to start if the gamma is `broken`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, int | None]] = []
        self.broken: int | None = None
        monkeypatch.setattr(laboratory, "deployment", self.deployment)
        monkeypatch.setattr(laboratory, "measure", self.measure)

    @asynccontextmanager
    async def deployment(self, part: ComparisonConfig, note: Callable[[str], None]) -> AsyncGenerator[ComparisonConfig]:
        (contender, *_) = part.chosen
        self.started.append((contender.draft_name, contender.gamma))
        assert contender.topology is not Topology.FUSED or part.gammas == (contender.gamma,)
        if contender.gamma == (self.broken or -1):
            raise UnavailableError("the compiler was killed")
        yield part

    async def measure(self, part: ComparisonConfig, *_: Any) -> list[Sample]:
        return samples(part)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


def study(folder: Path, *flags: str) -> StudyConfig:
    """Return the configuration of a study on backend neuron: two drafts and three gammas, one set of conditions."""
    (folder / "report").mkdir(exist_ok=True)
    for kind in ("structured", "open_ended"):
        (folder / f"{kind}.txt").write_text("1 2 3")
    target, small, large = (model_directory(folder, name) for name in ("target", "small", "large"))
    models = f"--backend neuron --target_model {target} --draft_models {small},{large} --topologies target,fused"
    place = "--rtt_ms 0 --concurrency 1 --max_new_tokens 12 --temperature 0 --gamma 6,4,5 --num_runs 1 --one_at_a_time"
    files = f"--dataset {folder}/structured.txt --dataset {folder}/open_ended.txt --output {folder}/report"
    return parse_study([*f"{models} {place} {files}".split(), *flags])


async def conducted(config: StudyConfig) -> list[tuple[str, int | None]]:
    """Run a study; return (draft, gamma) of its measurements; assert that each was made with both kinds of prompt."""
    trials = (await conduct_study(config, Console(file=io.StringIO()))).evidence.trials
    assert [trial.place.kind for trial in trials] == ["structured", "open_ended"] * (len(trials) // 2)
    return [(trial.contender.draft_name, trial.contender.gamma) for trial in trials[::2]]


async def test_every_graph_is_served_once_and_the_target_alone_once(servers: Servers, tmp_path: Path) -> None:
    found = await conducted(study(tmp_path))
    assert servers.started == [("-", None), *found]  # each at both kinds of prompts
    assert found == [("lookup", 6), *((draft, gamma) for draft in ("small", "large") for gamma in (6, 4, 5))]
    assert not (tmp_path / "report" / FILE).exists()


async def test_an_interrupted_study_goes_on(servers: Servers, tmp_path: Path) -> None:
    """A study continued after an interruption repeats no measurement that it had, and ends with all of them."""
    servers.broken = 5
    with pytest.raises(UnavailableError, match="the compiler was killed"):
        await conducted(study(tmp_path))
    done, servers.started = servers.started[1:-1], []
    with (tmp_path / "report" / FILE).open("a") as file:
        file.write('{"trial": {"pla')  # the machine lost its power while this was written
    found = await conducted(study(tmp_path, "--gamma", "6,4", "--budget", "9h"))
    assert (done, found[:3]) == ([("lookup", 6), ("small", 6), ("small", 4)], done)
    assert servers.started == [("-", None), ("large", 6), ("large", 4)]
    assert found[3:] == servers.started[1:]


async def test_no_server_starts_for_a_trial_that_the_budget_does_not_allow(servers: Servers, tmp_path: Path) -> None:
    hasty = replace(study(tmp_path), budget_s=0.0)
    done = await conduct_study(hasty, Console(file=io.StringIO()))
    assert len(servers.started) <= 2
    assert len(done.evidence.skipped) + len(done.evidence.trials) == 14
    assert len(await conducted(study(tmp_path))) == 7  # with time for the others
    assert not (tmp_path / "report" / FILE).exists()


async def test_trials_of_another_study_are_no_part_of_this_one(servers: Servers, tmp_path: Path) -> None:
    servers.broken = 5
    with pytest.raises(UnavailableError):
        await conducted(study(tmp_path))
    servers.broken, servers.started = None, []
    found = await conducted(study(tmp_path, "--num_runs", "2"))
    assert servers.started == [("-", None), *found]
