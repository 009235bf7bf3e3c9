"""The ASGI middleware that this project puts before vLLM's HTTP server, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.inference.vllm.door import Door


async def test_a_client_that_hangs_up_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose client hangs up before the end of its body is dropped.

    Regression: vLLM's log got a traceback for each such request.
    """
    from vllm.sampling_params import SamplingParams

    monkeypatch.setattr(
        SamplingParams, "_validate_spec_decode", SamplingParams._validate_spec_decode
    )  # for other tests

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def refuse(*arguments: Any) -> None:
        raise AssertionError(arguments)

    await Door(refuse)({"type": "http", "method": "POST"}, receive, refuse)
