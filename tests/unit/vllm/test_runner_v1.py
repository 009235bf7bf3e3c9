"""On vLLM's runner V1, requests whose logits are not finite are found; these tests do not need vLLM itself."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.inference.vllm.runner_v1 import names_not_finite


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_requests_without_finite_logits_are_named(fault: float) -> None:
    """Requests that have a row of logits without a finite maximum are found by name, and no others.

    Other logits of a row may be minus infinity, as by a bias.
    """
    logits = np.random.default_rng(1).normal(size=(6, 9))  # rows of requests a, b, c: 1, 3, 2
    logits[:, 4] = -np.inf
    assert names_not_finite(logits, "abc", [1, 3, 2]) == []
    logits[2] = fault
    assert names_not_finite(logits, "abc", [1, 3, 2]) == ["b"]
    logits[5, 3 if fault != -np.inf else slice(None)] = fault
    assert names_not_finite(logits, "abc", [1, 3, 2]) == ["b", "c"]
