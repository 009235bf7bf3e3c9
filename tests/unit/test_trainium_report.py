"""Figures and prompts of the Trainium report."""

from __future__ import annotations

from inference.cli.prompts.results import Result
from inference.config import BUNDLED_TARGET, ROOT
from inference.errors import UnavailableError
from inference.text.tokenizer import Tokenizer
from scripts.trainium_report.distribution import samples
from scripts.trainium_report.load import prompts_of
from scripts.trainium_report.tables import figures, report
from scripts.trainium_report.variant import Variant


def answered(*arrivals_s: float) -> Result:
    result = Result("kind")
    result.stats.started = 0.0
    result.stats.arrivals = [(arrived_s, 2) for arrived_s in arrivals_s]
    return result


def failed() -> Result:
    return Result("kind", error=UnavailableError("gone"))


def test_figures_are_llmperf_s() -> None:
    """One token per pass, but two in each message: gaps between messages are not gaps between tokens."""
    values = samples([answered(1.0, 2.0, 4.0)])
    assert values["ttft_s"] == [1.0]
    assert values["inter_token_latency_s"] == [3.0 / 5]
    assert values["message_gap_s"] == [1.0, 2.0]
    assert values["request_output_throughput_token_per_s"] == [6 / 4.0]
    assert values["number_output_tokens"] == [6.0]


def test_failed_requests_are_counted_and_not_measured() -> None:
    variant = Variant("with", "fused_target", (), results=[answered(1.0, 2.0), failed()], load_s=30.0)
    cell = figures(variant, "kind")
    assert cell["errors"] == ["gone"]
    assert (cell["num_completed_requests"], cell["num_completed_requests_per_min_all_kinds"]) == (1, 2.0)
    assert cell["ttft_s"]["max"] == 1.0
    other = Variant("without", "target", (), results=[answered(2.0, 4.0), answered(2.0, 4.0)])
    text = report([other, variant], None)
    assert "| errors | 0 |  | 1 |  |  |" in text
    assert "| ttft_s | 2 | 2 | 1 | 1 | 0.5 |" in text
    assert "Equal answers: 1 of 1." in text


def test_prompts_have_exactly_so_many_tokens_and_differ() -> None:
    file = ROOT / "prompts" / "structured.txt"
    prompts = prompts_of(file, Tokenizer.load(BUNDLED_TARGET), num_tokens=3000, number=3)
    assert {len(prompt) for prompt in prompts} == {3000}
    assert len(set(prompts)) == 3
