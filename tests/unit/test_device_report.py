"""Reports of device runs and of vLLM show the figures of compared servers side by side, or why a step did not run."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import same_text
from benchmarks.peers import over_vllm, vllm
from benchmarks.peers.child import Setup
from scripts.device_report.__main__ import main
from scripts.device_report.bundle import write_bundle
from scripts.device_report.steps import Step
from scripts.device_report.tables import by_kind, report
from scripts.device_report.variant import Variant
from scripts.device_report.vllm import MISSING, NO_HYBRID, WAYS
from scripts.device_report.vllm import main as vllm_main
from specdec.comparison.plan.config import Contender, Topology
from specdec.comparison.plan.grid import Cell, Sample
from specdec.comparison.plan.record import RequestRecord
from tests.support.samples import record

TARGET, FUSED = Contender(Topology.TARGET), Contender(Topology.FUSED)
FAILED = RequestRecord(1, 0.0, 0, (), (), "UNAVAILABLE", "gone", failed_s=1.0)


def variant(contender: Contender, *failures: RequestRecord) -> Variant:
    sample = Sample(
        Cell(contender, "kind", 0.0, 1), 0, (record(contender), record(contender, prompt_index=2)), failures
    )
    return Variant(contender.name, contender.name, (), samples=[sample])


def test_failed_requests_are_counted_and_not_measured() -> None:
    alone, pair = variant(TARGET), variant(FUSED, FAILED)
    cells = by_kind([alone, pair])["kind"]
    assert [cell["errors"] for cell in cells] == [[], ["gone"]]
    assert [cell["num_completed_requests"] for cell in cells] == [2, 2]
    assert [cell["acceptance_rate"] for cell in cells] == [None, 2 / 3]
    text = report([alone, pair], None)
    assert "| number_errors | 0 |  | 1 |  |  |" in text
    assert "| mean_output_throughput_token_per_s | " in text
    assert "| ttft_s | 0.02 | 0.02 | 0.03 | 0.03 | 1.5 |" in text
    assert "Equal answers: 2 of 2." in text


def test_answers_that_differ_are_counted() -> None:
    alone, pair = variant(TARGET), variant(FUSED)
    (sample,) = pair.samples
    pair.samples = [replace(sample, records=(replace(sample.records[0], token_ids=(1,)), sample.records[1]))]
    assert "Equal answers: 1 of 2." in report([alone, pair], None)


def test_a_server_that_did_not_start_leaves_a_page() -> None:
    text = report([variant(TARGET), Variant("with", "fused_target", ())], "no device")
    assert "(did not start)" in text
    assert "    no device" in text


def test_all_figures_are_rows_for_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    write_bundle(tmp_path / "report", [variant(TARGET), variant(FUSED, FAILED)], [])
    with (tmp_path / "report" / "results.csv").open(newline="") as file:
        alone, pair = csv.DictReader(file)
    assert (alone["variant"], alone["kind"], float(alone["ttft_s_p50"])) == (TARGET.name, "kind", 0.02)
    assert (pair["error_code_frequency_UNAVAILABLE"], alone["error_code_frequency_UNAVAILABLE"]) == ("1", "")


def test_the_page_has_each_step_and_whether_it_passed(tmp_path: Path) -> None:
    passed = Step("Passes of a kind", ("timeit", "-n1", "-r1", "pass")).run(tmp_path)
    failed = Step("Contract suite", ("timeit", "-n1", "-r1", "1/0")).run(tmp_path)
    page = report([variant(TARGET)], None, [passed, failed])
    assert (passed.passed, failed.passed) == (True, False)
    assert page.index("## Passes of a kind\n") < page.index("## Contract suite (failed)") < page.index("# Without and")
    assert "ZeroDivisionError" in page
    assert "1 loop, best of 1" in (tmp_path / "passes_of_a_kind.log").read_text()


def test_the_report_of_vllm_names_ways_that_exist() -> None:
    known = {*vllm.ways(Setup("target", "draft", "float32", "folder", 1, 8)), *over_vllm.WAYS}
    assert set().union(*WAYS.values()) <= known


@pytest.mark.parametrize(("found", "reasons"), [(None, {MISSING}), (True, {NO_HYBRID})])
def test_the_report_of_vllm_names_every_step_and_why_it_did_not_run(
    found: object, reasons: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of the vLLM report has every step, with the reason if the step did not run."""
    monkeypatch.setattr("scripts.device_report.vllm.find_spec", lambda name: found)
    if found:  # races need vLLM itself: tests/vllm/test_report.py
        monkeypatch.setattr("scripts.device_report.vllm.WAYS", {"Hybrid model": WAYS["Hybrid model"]})
    assert vllm_main(["--vocab_size", "64", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    titles = [title for title in WAYS if f"## {title}\n" in page]
    assert titles == (["Hybrid model"] if found else list(WAYS))
    assert {line for line in page.splitlines() if line.startswith("Not run")} == {
        f"Not run: {each}." for each in reasons
    }
    assert found or "ms for rows of 64 tokens on cpu" in page


@pytest.mark.parametrize(("device", "reason"), [("cuda", "sees no GPU here"), ("neuron", "needs TorchNeuron")])
def test_a_missing_device_ends_the_report(
    device: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", exc_type=ModuleNotFoundError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "report"
    assert main(["--device", device, "--target_model", "A", "--draft_model", "B", f"--output={output}"]) == 2
    assert reason in capsys.readouterr().err
    assert not output.exists()


def test_the_text_of_a_way_is_compared_with_its_own_way_without_speculation() -> None:
    """Each text is compared with the text of the same engine without speculation; differing tokens are counted.

    With vLLM's batch invariance the right texts are others than without it.
    """

    def at(rate: float, *texts: list[int]) -> dict[str, dict[str, object]]:
        return {str(temperature): {"rate": rate, "texts": list(texts)} for temperature in same_text.TEMPERATURES}

    results = {
        same_text.PLAIN: at(10.0, [1, 2], [3, 4]),
        same_text.DEFAULT: at(20.0, [1, 9], [3, 9]),
        same_text.OURS: at(21.0, [1, 2], [3, 9]),
        f"{same_text.PLAIN}, {same_text.INVARIANT}": at(8.0, [5, 6], [7, 8]),
        f"{same_text.OURS}, {same_text.INVARIANT}": at(16.0, [5, 6], [7, 8]),
    }
    assert list(results) == list(same_text.WAYS)
    rows = same_text.rows(results)
    assert [row[-1] for row in rows] == ["0 of 6", "6 of 6", "3 of 6", "0 of 6", "0 of 6"]
    assert rows[2][1:4] == ["21.0"] * 3


def test_a_way_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no engine works, as without vLLM, the benchmark names all of them and ends with exit code 1."""
    monkeypatch.setattr("sys.argv", ["same_text", "--model", "nowhere", "--speculative_config", "{}"])
    with pytest.raises(SystemExit, match="1"):
        same_text.main()
    assert "Not run, as the log says: no speculation; vLLM's rule; same_text; " in capsys.readouterr().out
