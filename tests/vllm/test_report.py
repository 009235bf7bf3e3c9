"""Test of the GPU report (scripts/device_report) with the real vLLM on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.device_report.vllm import parser, steps

pytestmark = [pytest.mark.timeout(1800), pytest.mark.release]


@pytest.mark.parametrize(
    ("title", "parts"),
    [
        (
            "Price of synchronous scheduling",
            ("plain over plain", "| specdec, plain", "| vLLM, plain", "| vLLM, asynchronous"),
        ),
        (
            "fp8",
            (
                "| vLLM, plain",
                "SKIPPED: vLLM, fp8 (float32, 1 streams): ",
                "torch.float32 is not supported for quantization method fp8",
            ),
        ),
    ],
)
def test_a_step_has_figures_of_both_or_the_reason(title: str, parts: Sequence[str], tmp_path: Path) -> None:
    """A step of the report has figures of both compared servers, or the reason why it has none.

    The models are the bundled ones with wider attention heads, as the report uses without `--pair`.
    """
    args = parser().parse_args(["--streams", "1", "--tokens", "8", "--output", str(tmp_path)])
    (step,) = (step for step in steps(args) if step.title == title)
    done = step.run(tmp_path)
    assert done.passed, done.text
    for part in parts:
        assert part in done.text
