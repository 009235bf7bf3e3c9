"""The study's command line, and a group of its trials as the comparison that measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from comparison.plan.config import ALONE, LOOKUP, Contender, Topology
from comparison.study.flags import AS_JSON, StudyConfig, parse_study
from comparison.study.laboratory import comparison_of
from comparison.study.space import Group
from inference.errors import ConfigError
from inference.request import GrammarKind

FLAGS = ["--topologies", "target,fused", "--concurrency", "1", "--gamma", "4,8"]


def parsed(*flags: str) -> StudyConfig:
    return parse_study([*FLAGS, *flags])


def test_the_first_of_every_list_is_the_usual_one() -> None:
    config = parsed("--rtt-ms", "80,0", "--max-new-tokens", "32,8", "--temperature", "0.5,0", "--budget", "90s")
    usual = config.space.usual
    assert (usual.rtt_ms, usual.max_new_tokens, usual.temperature, usual.kind) == (80.0, 32, 0.5, "structured")
    assert config.space.ways == (Contender(Topology.TARGET, LOOKUP, 8), config.comparison.contenders[1])
    assert config.budget_s == 90.0
    assert config.prices is None


def test_a_group_is_a_comparison_with_the_target_alone(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    config = parsed("--json_schema", str(tmp_path / "schema.json"), "--max_new_tokens", "32,8")
    plain, as_json = config.space.usual, next(it for it in config.space.changed(1) if it.kind.endswith(AS_JSON))
    for place in (plain, as_json):
        comparison = comparison_of(config, Group(place, config.space.ways))
        assert comparison.contenders == (ALONE, *config.space.ways)
        assert [prompt_set.kind for prompt_set in comparison.workload.prompt_sets] == ["structured"]
        assert comparison.network.rtts_ms == (place.rtt_ms,)
        grammar = comparison.workload.grammar
        assert (grammar and grammar.kind) == (GrammarKind.JSON_SCHEMA if place is as_json else None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topologies", "fused"], "a study needs the target alone"),
        (["--max_new_tokens", "32,1"], "max_new_tokens 1 is below 2"),
        (["--temperature", "0,101"], "temperature 101.0 is outside 0..100"),
        (["--max_new_tokens", ","], "max_new_tokens 0 is below 2"),
        (["--json_schema", "nowhere.json"], "grammar file nowhere.json cannot be read"),
        (["--endpoint", "a=grpc://localhost:1", "--rtt_ms", "0"], "endpoint: for a comparison, not for a study"),
        (["--request_rate", "2", "--llmperf"], "request_rate, llmperf: for a comparison"),
        (["--llmperf"], "llmperf: for a comparison"),
    ],
)
def test_what_cannot_be_studied_is_refused(flags: list[str], message: str) -> None:
    """The story: the study took all flags of the comparison. An endpoint that was faster ended it with a traceback, and
    with --request_rate the speed-ups were those of requests that come on their own, which are 1 for whoever keeps up.
    """
    with pytest.raises(ConfigError, match=message):
        parsed(*flags)


@pytest.mark.parametrize(
    "flags", [["--budget", "10"], ["--budget", "0m"], ["--price_per_hour", "1,2,3"], ["--nothing"]]
)
def test_flags_that_mean_nothing_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*flags)
    assert flags[0] in capsys.readouterr().err


def test_a_study_repeats_and_takes_a_comparisons_file(tmp_path: Path) -> None:
    """Its own defaults came behind the file's flags and won, and no file was written that asks for the same again."""
    first = parsed("--rtt-ms", "80,0", "--max-new-tokens", "32,8", "--budget", "90s", "--price_per_hour", "3,1")
    (tmp_path / "config.toml").write_text(first.comparison.asked)
    assert parse_study(["--config", str(tmp_path / "config.toml")]) == first
    (tmp_path / "config.toml").write_text(
        'gamma = "3"\nconcurrency = "1"\ntopologies = "target,fused"\nmax_new_tokens = 20'
    )
    found = parse_study(["--config", str(tmp_path / "config.toml")])
    assert (found.comparison.gammas, found.space.usual.max_new_tokens) == ((3,), 20)
