"""A failed start of vLLM becomes one line: the first error in its log, and the flag that has the refused value."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from specdec.inference.errors import ConfigError
from specdec.inference.vllm.refusals import FIRST_ERROR, log, refusals

REASON = "_C::static_scaled_fp8_quant() expected\nat most 0 arguments"


def fail() -> None:
    """Log errors as vLLM's processes do when a start fails; raise RuntimeError as vLLM's main process then does."""
    logger = logging.Logger("vllm")
    logger.addHandler(handler := logging.StreamHandler(log))
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    for kind, reason in ((logging.WARNING, "harmless"), (logging.ERROR, REASON), (logging.ERROR, "see above")):
        try:
            raise RuntimeError(reason)
        except RuntimeError:
            logger.log(kind, "in a core", exc_info=True)
    raise RuntimeError("the core has failed")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--quantization fp8", "--quantization fp8: _C::static_scaled_fp8_quant() expected at most 0 arguments"),
        ("--dtype float32 --seed 0", "refuses this: _C::static_scaled_fp8_quant() expected at most 0 arguments"),
    ],
)
def test_the_first_error_in_the_log_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, line: str
) -> None:
    monkeypatch.setenv(FIRST_ERROR, str(tmp_path / "first"))
    with pytest.raises(ConfigError) as caught, refusals(flags.split()):
        fail()
    assert line in caught.value.message
    assert "see above" in capsys.readouterr().err


def test_without_an_error_in_the_log_that_of_the_front_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FIRST_ERROR, raising=False)
    with pytest.raises(ConfigError, match="the core has failed"), refusals():
        raise RuntimeError("the core has failed")
