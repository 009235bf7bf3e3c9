"""The GPU report on the real vLLM, on a CPU: one race runs, and one has the reason why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.device_report.vllm import parser, steps
from tests.vllm.conftest import Pair

pytestmark = [pytest.mark.timeout(400), pytest.mark.release]


def test_a_step_has_figures_of_both_or_the_reason(pair: Pair, tmp_path: Path) -> None:
    load = ("--streams", "1", "--tokens", "8", "--pair", f"{pair.target},{pair.draft}", "--output", str(tmp_path))
    by_title = {step.title: step for step in steps(parser().parse_args(load))}
    done = by_title["Price of synchronous scheduling"].run(tmp_path)
    assert done.passed, done.text
    assert "plain over plain" in done.text
    for name in ("specdec, plain", "vLLM, plain", "vLLM, asynchronous"):
        assert f"| {name}" in done.text
    done = by_title["fp8"].run(tmp_path)
    assert done.passed, done.text
    assert "SKIPPED: vLLM, fp8 (float32, 1 streams): " in done.text
