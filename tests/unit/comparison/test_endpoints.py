"""A comparison of endpoints in trouble: it goes on, and its report says what happened."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from inference.comparison.app import _compare as compare
from inference.comparison.plan.flags import parse_config
from inference.comparison.report.files import prepare_directory, write_report
from tests.support.foreign import foreign_server


async def test_failures_are_counted_by_code_and_everything_else_is_measured(tmp_path: Path) -> None:
    """One kind of prompt fails now and then, one always: its cells have no times, and the report is written."""
    (tmp_path / "some.txt").write_text("plain\nit dies here\n")
    (tmp_path / "none.txt").write_text("busy\nbusy again\n")
    async with foreign_server() as one, foreign_server() as other:
        flags = ["--endpoint", f"one={one.url}", "--endpoint", f"other={other.url}", "--num_runs", "2"]
        flags += ["--dataset", str(tmp_path / "some.txt"), "--dataset", str(tmp_path / "none.txt")]
        config = parse_config([*flags, "--concurrency", "1,2", "--output", str(tmp_path / "report")])
        findings = await compare(config, Console(file=io.StringIO()))
    prepare_directory(config.output)
    results = write_report(findings, config.output)
    errors = {
        (it["endpoint"], it["kind"], it["concurrency"]): it["error_code_frequency"] for it in results["statistics"]
    }
    assert errors["one", "some", 1] == {"DISCONNECTED": 2}
    assert errors["other", "none", 2] == {"503": 8}
    assert {(cell["endpoint"], cell["kind"]) for cell in results["cells"]} == {("one", "some"), ("other", "some")}
    assert (results["same_tokens"], results["not_comparable"]) == (None, ["one", "other"])
    assert findings.num_failed == 2 * ((2 + 4) + (4 + 8))
    assert findings.agreement.holds
    page = (config.output / "report.html").read_text()
    assert "not comparable, models are not known to be the same: one, other" in page
    assert (config.output / "config.toml").read_text() == config.asked
