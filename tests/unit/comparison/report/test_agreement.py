"""Same tokens, or a failure that says where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from comparison.app import _report as report
from comparison.plan.config import Contender, NetworkConfig, PromptSet, Topology, WorkloadConfig
from comparison.plan.grid import Cell, Sample
from comparison.plan.record import RequestRecord
from comparison.report.agreement import check_agreement
from comparison.report.files import prepare_directory
from comparison.run.pairs import Output, Parting, first_difference
from tests.support.samples import TOKENS, config, findings, samples


@pytest.mark.parametrize(
    ("expected", "actual", "parting"),
    [
        *(([1, 2], [1, 2], None), ([1, 2], [1, 3], (1, 2, 3)), ([1, 2], [1], (1, 2, None))),
        *(([], [1], (0, None, 1)), ([], [], None), ("ab", "a", (1, "b", None))),
    ],
)
def test_first_difference(expected: Output, actual: Output, parting: Parting | None) -> None:
    assert first_difference(expected, actual) == parting


def test_equal_answers_agree(tmp_path: Path) -> None:
    measured = samples(config(tmp_path))
    agreement = check_agreement(measured)
    assert agreement.holds
    assert agreement.num_requests == sum(len(sample.records) for sample in measured)
    assert "same tokens" in str(agreement)


def test_a_planted_difference_names_topology_prompt_and_position(tmp_path: Path) -> None:
    agreement = check_agreement(_planted(samples(config(tmp_path)), position=5))
    (difference,) = agreement.differences
    assert (difference.cell.contender.label, difference.cell.kind) == ("fused (draft draft, gamma 3)", "structured")
    assert (difference.prompt_index, difference.position) == (1, 5)
    assert (difference.expected, difference.actual) == (TOKENS[5], 9)
    assert "fused (draft draft, gamma 3), structured prompt 2, output position 5: token 9" in str(difference)


def test_a_planted_difference_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = (PromptSet("structured", ("1 2 3", "a b c")),)
    settings = config(tmp_path, network=NetworkConfig((0.0,)), workload=WorkloadConfig(sets, num_runs=1))
    prepare_directory(settings.output)
    console = Console(stderr=True)
    assert report(findings(settings), console) == 0
    assert report(findings(settings, _planted(samples(settings), position=0)), console) == 1
    captured = capsys.readouterr()
    assert "error: fused (draft draft, gamma 3), structured prompt 2, output position 0" in captured.err
    assert '"same_tokens":false' in captured.out.splitlines()[-1]
    assert "DIFFERENT TOKENS" in (settings.output / "report.html").read_text()


def _planted(measured: list[Sample], *, position: int) -> list[Sample]:
    """One wrong token in one answer."""
    index = next(i for i, it in enumerate(measured) if it.cell.contender.topology is Topology.FUSED)
    first, second = measured[index].records
    token_ids = (*TOKENS[:position], 9, *TOKENS[position + 1 :])
    wrong = dataclasses.replace(measured[index], records=(first, dataclasses.replace(second, token_ids=token_ids)))
    return [*measured[:index], wrong, *measured[index + 1 :]]


def _answer(endpoint: str | None, model_id: str, text: str, *token_ids: int) -> Sample:
    contender = Contender(Topology.TARGET) if endpoint is None else Contender(Topology.ENDPOINT, endpoint=endpoint)
    record = RequestRecord(0, 0.0, 3, token_ids, (), text=text, model_id=model_id)
    return Sample(Cell(contender, "kind", 0.0, 1), 0, (record,))


def test_only_servers_of_the_same_model_are_compared() -> None:
    """By their tokens where both tell them, else by their text; what other models say, says nothing of ours."""
    ours, same = _answer(None, "m", "ab", 1, 2), _answer("a", "m", "ab")
    unknown, others = _answer("b", "", "zz"), [_answer("c", "n", "yy", 9), _answer("d", "n", "yx")]
    agreement = check_agreement([ours, same, unknown])
    assert (agreement.holds, agreement.not_comparable, agreement.by_text) == (True, ("b",), True)
    assert str(agreement).endswith("; not comparable, models are not known to be the same: b")
    agreement = check_agreement([ours, _answer("a", "m", "ab", 1, 3), *others])
    assert [str(it) for it in agreement.differences] == [
        "a, kind prompt 1, output position 1: token 3 where target has 2 (rtt 0 ms, concurrency 1, run 1)",
        "d, kind prompt 1, output position 1: character 'x' where c has 'y' (rtt 0 ms, concurrency 1, run 1)",
    ]


def test_equality_is_claimed_only_when_asserted() -> None:
    strangers = [_answer("a", "", "ab"), _answer("b", "n", "ac", 1)]
    agreement = check_agreement(strangers)
    assert (agreement.is_known, agreement.holds, agreement.not_comparable) == (False, True, ("a", "b"))
    assert str(agreement) == "not comparable, models are not known to be the same: a, b"
    (difference,) = check_agreement(strangers, equal_weights=True).differences
    assert (difference.cell.contender.label, difference.position) == ("b", 1)
