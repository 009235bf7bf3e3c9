"""A study's advice from made-up measurements: what it recommends, where that changes, its costs and its wording."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.comparison.plan.backend import BackendConfig
from specdec.comparison.plan.config import LOOKUP, Contender, Topology
from specdec.comparison.plan.roles import commands, service_toml
from specdec.comparison.report.summary import Spread
from specdec.comparison.study.advice import Evidence, Prices, Trial, crossovers, sentences
from specdec.comparison.study.plots import over_conditions
from specdec.comparison.study.report import Study, json_of, write_study
from specdec.comparison.study.space import Group, Space
from specdec.inference.cli.roles.registry import parser_of
from specdec.inference.config import Emulation, PassTime
from specdec.inference.request import Schedule
from tests.support.samples import BUSY, QUIET, config

FUSED = Contender(Topology.FUSED, "draft", 8)
ASYNC = Contender(Topology.DISTRIBUTED, "draft", 8, Schedule.ASYNC, 3)
BY_ITSELF = Contender(Topology.TARGET, LOOKUP, 8)
SPACE = Space(
    (BY_ITSELF, FUSED, ASYNC),
    {
        "kind": ("prose",),
        "rtt_ms": (10.0, 80.0),
        "concurrency": (1, 8, 32),
        "max_new_tokens": (96, 16, 4),
        "temperature": (0.0,),
    },
)


def trial(contender: Contender, speedup: float, **place: object) -> Trial:
    where = replace(SPACE.usual, **place)  # type: ignore[arg-type]
    return Trial(where, contender, Spread(speedup, speedup * 0.99, speedup * 1.01), 40 * speedup, 40.0, 0.1, 0.2)


def advised(*speedups: tuple[Contender, float]) -> Contender | None:
    best = Evidence(SPACE, [trial(contender, speedup) for contender, speedup in speedups]).best(SPACE.usual)
    return best.contender if best else None


def test_a_picture_of_many_conditions_has_rows() -> None:
    """A picture with many panels has several rows.

    Regression: five panels were side by side, too small to read on a page.
    """
    evidence = Evidence(SPACE, [trial(FUSED, 2.0), trial(FUSED, 0.5, concurrency=8), trial(FUSED, 1.5, rtt_ms=80.0)])
    figure = over_conditions(evidence, ["gamma", "max_new_tokens", "rtt_ms", "temperature", "concurrency"])
    assert sum(axes.get_visible() for axes in figure.axes) == 5
    assert figure.get_figwidth() < 12  # inches
    assert "this colour is as fast as the target alone" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([(FUSED, 2.0), (ASYNC, 3.0)], ASYNC),
        ([(FUSED, 2.95), (ASYNC, 3.0)], FUSED),  # a tie: one machine less
        ([(BY_ITSELF, 1.5), (FUSED, 1.52), (ASYNC, 1.55)], BY_ITSELF),
        ([(FUSED, 1.04), (ASYNC, 0.5)], None),  # not worth a draft
        ([(FUSED, 0.4)], None),
    ],
)
def test_the_fastest_is_advised_unless_simpler_equals(
    speedups: list[tuple[Contender, float]], expected: Contender | None
) -> None:
    assert advised(*speedups) == expected


def test_a_contender_that_lost_in_a_run_is_not_advised() -> None:
    shaky = replace(trial(FUSED, 1.5), speedup=Spread(1.5, 0.9, 2.1))
    assert Evidence(SPACE, [shaky]).best(SPACE.usual) is None


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({1: 3.0, 4: 2.0, 16: 0.0}, [8.0]),  # halfway between 4 and 16, by powers of two
        ({1: 3.0, 4: 2.0}, []),
        ({8: 0.5, 32: 1.5}, [16.0]),
    ],
)
def test_a_crossover_is_where_the_curve_meets_one(speedups: dict[float, float], expected: list[float]) -> None:
    assert crossovers({load: trial(FUSED, each) for load, each in speedups.items()}) == pytest.approx(expected)


def evidence() -> Evidence:
    loads = [trial(FUSED, speedup, concurrency=load) for load, speedup in ((8, 1.5), (32, 0.5))]
    lengths = [trial(FUSED, speedup, max_new_tokens=length) for length, speedup in ((16, 1.2), (4, 0.8))]
    far = [trial(FUSED, 1.3, rtt_ms=80.0), trial(ASYNC, 2.6, rtt_ms=80.0)]
    usual = [trial(FUSED, 3.0), trial(ASYNC, 2.0), trial(BY_ITSELF, 1.1)]
    skipped = [Group(replace(SPACE.usual, rtt_ms=80.0), (BY_ITSELF,))]
    return Evidence(SPACE, [*usual, *loads, *lengths, *far], skipped)


def test_advice_has_gains_crossovers_and_costs() -> None:
    text = "\n".join(sentences(evidence(), Prices(36.0)))
    for expected in (
        "serve with fused (draft draft, gamma 8). It gives 3.00",
        "120 tokens/s instead of 40",
        "pays from 16 output tokens on, not at 4",
        "loses from about 16 in flight on",
        "At round trip 80 ms, all else as usual: distributed async",
        "At 32 in flight, all else as usual: the target alone",
        "Slower than the target alone in 2 of 9 trials",
        "A million tokens cost 83.33 with 1 in flight, 250.00 by the target alone",
        "9 of 54 combinations were tried; for 1 groups more the time was too short",
    ):
        assert expected in text


def test_costs_include_the_draft_s_own_machine() -> None:
    prices = Prices(36.0, 3.6)
    assert prices.per_million_tokens(FUSED, 100.0) == pytest.approx(100.0)
    assert prices.per_million_tokens(ASYNC, 100.0) == pytest.approx(110.0)
    assert prices.per_million_tokens(None, 100.0) == pytest.approx(100.0)


def test_advice_without_time_is_marked() -> None:
    (sentence,) = sentences(Evidence(SPACE, []), None)
    assert "Nothing was measured" in sentence


POOL = Contender(Topology.POOL, "draft", 8, branches=3)


@pytest.mark.parametrize("contender", [None, BY_ITSELF, FUSED, ASYNC, POOL, replace(FUSED, draft="ngram")])
def test_the_service_can_be_started(tmp_path: Path, contender: Contender | None) -> None:
    """The file that a study writes starts the service that it recommends.

    Regression: the file lacked the backend, so after a study of backend torch it started servers of another one.
    """
    settings, file = config(tmp_path, backend=BackendConfig("torch", "onnx")), tmp_path / "service.toml"
    file.write_text(service_toml(settings, contender, 'the reason, with "quotes"'))
    role = "fused_target" if contender and contender.topology is Topology.FUSED else "target"
    args = parser_of(role).parse_args(["--config", str(file)])
    assert args.backend == "torch"
    assert getattr(args, "target_model" if role == "fused_target" else "model") == settings.target_model.resolve()
    if contender in (ASYNC, POOL):
        draft = parser_of("draft").parse_args(["--config", str(file)])
        schedule = "async" if contender == ASYNC else parser_of("draft").parse_args([]).schedule
        assert (draft.gamma, draft.schedule, draft.branches, draft.backend) == (8, schedule, 3, "onnx")
    elif role == "target":
        assert args.lookup == (contender is not None)
    for line in commands(settings, contender):
        program, name, *flags = shlex.split(line)
        args = parser_of(name).parse_args(flags)
        assert program == "specdec"
        assert name != "draft" or (args.attach or args.target_host).startswith("HOST")


def test_files_name_emulation_and_gaps(tmp_path: Path) -> None:
    settings = config(tmp_path, backend=BackendConfig(emulation=Emulation(PassTime(0.025))), output=tmp_path)
    study = Study(settings, evidence(), (), None, 60.0, QUIET)
    write_study(study, tmp_path)
    results = json_of(study)
    assert results["emulated"] == "target:25ms"
    assert results["recommended"]["topology"] == "fused"
    assert results["not_tried"][0]["rtt_ms"] == 80.0
    page = (tmp_path / "study.html").read_text()
    assert "EMULATED" in page
    assert "data:image/png;base64," in page
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_a_busy_machine_gets_no_advice(tmp_path: Path) -> None:
    """A study on a busy machine gives no advice.

    Regression: at a load average of 24 a study advised the target alone, though drafts were 2.4 times as
    fast.
    """
    quiet = Study(config(tmp_path, output=tmp_path), evidence(), (), None, 60.0, QUIET, spread=1.1)
    unsteady = replace(quiet, spread=2.3)
    assert [study.is_withheld for study in (quiet, unsteady, replace(unsteady, anyway=True))] == [False, True, False]
    assert not quiet.warning
    (tmp_path / "service.toml").touch()  # of an earlier study
    study = replace(quiet, load=BUSY)
    write_study(study, tmp_path)
    results = json_of(study)
    assert (results["recommended"], results["load"]["before"]) == (None, study.load.before)
    assert [text.partition(":")[0] for text in results["warnings"]] == ["The machine was busy or unsteady"]
    assert not any("serve with" in text for text in results["advice"])
    assert not (tmp_path / "service.toml").exists()
    assert str(study.load) in (tmp_path / "study.html").read_text()
    write_study(study := replace(study, anyway=True), tmp_path)
    results = json_of(study)
    assert results["recommended"]["topology"] == "fused"
    assert results["warnings"] == [study.warning] == results["advice"][:1]
    assert "serve with fused" in (tmp_path / "service.toml").read_text()


def test_one_run_has_no_range() -> None:
    """A figure of one run has no range.

    Regression: a study of one run had "7.14 (7.14-7.14) times", which looks like a precise measurement.
    """
    once = replace(trial(FUSED, 1.5), speedup=Spread(7.14, 7.14, 7.14))
    assert str(once) == "7.14 (one run)"
    assert str(replace(once, speedup=Spread(1.5, 1.25, 1.75))) == "1.50 (1.25-1.75)"
