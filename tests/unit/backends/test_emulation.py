"""Passes of a model with an emulated pass time take at least that time, and give the same logits as without."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.backends.registry import load_backend
from specdec.inference.config import NOT_EMULATED, Emulation, ModelConfig, PassTime
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import ForkingBackend, Span
from tests.support.models import save_tiny_model

PASS_TIME = PassTime(0.03, 0.01, 0.008)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("target:25ms,draft:3ms", Emulation(PassTime(0.025), PassTime(0.003))),
        ("draft:0.5ms", Emulation(draft=PassTime(0.0005))),
        (" target:7ms", Emulation(PassTime(0.007))),
        ("target:0ms", NOT_EMULATED),
        ("target:25ms+1ms/session+0.1ms/token", Emulation(PassTime(0.025, 0.001, 0.0001))),
        ("draft:3ms+0.1ms/token", Emulation(draft=PassTime(0.003, 0.0, 0.0001))),
    ],
)
def test_texts_of_emulation_are_read_and_written_back(text: str, expected: Emulation) -> None:
    emulation = Emulation.parse(text)
    assert emulation == expected
    assert emulation == NOT_EMULATED or Emulation.parse(str(emulation)) == emulation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "say target:25ms,draft:3ms"),
        ("target:25", "target:25: say"),
        ("target:-1ms", "say target"),
        ("gateway:1ms", "say target"),
        ("target:10001ms", "target:10001ms is above 10000ms"),
        ("target:1ms+1ms/token+1ms/session", "each with"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Emulation.parse(text)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_an_emulated_pass_takes_its_time(tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str) -> None:
    path = save_tiny_model(tmp_path, "llama")
    plain = load_backend(ModelConfig(path, backend=backend, num_slots=2, num_threads=1))
    with caplog.at_level(logging.WARNING):
        slow = load_backend(ModelConfig(path, backend=backend, num_slots=2, num_threads=1, pass_time=PASS_TIME))
    assert "EMULATED: a pass of model" in caplog.text
    for spans, least_s in (([Span(0, 0, [1], 1)], 0.04), ([Span(0, 0, [1, 2, 3], 3), Span(1, 0, [4, 5], 1)], 0.06)):
        started = time.monotonic()
        logits = slow.forward(spans)
        assert time.monotonic() - started >= least_s
        np.testing.assert_array_equal(np.asarray(logits), np.asarray(plain.forward(spans)))
    assert isinstance(slow, ForkingBackend) == isinstance(plain, ForkingBackend)
    assert getattr(slow, "arithmetic", None) == getattr(plain, "arithmetic", "") != ""


def test_a_device_is_not_emulated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backend neuron has a device"):
        ModelConfig(save_tiny_model(tmp_path, "llama"), backend="neuron", pass_time=PASS_TIME)


@given(base=st.floats(0, 1), session=st.floats(0, 1), token=st.floats(0, 1), sessions=st.integers(1, 64))
def test_passes_follow_the_roofline(base: float, session: float, token: float, sessions: int) -> None:
    """An emulated pass takes the longer of reading the weights and computing the tokens, plus a time per session.

    `base`, `session` and `token` are seconds: of reading the weights, of each session, and of computing a token.

    A further token costs nothing until computing takes as long as reading the weights.
    """
    time_of = PassTime(base, session, token).seconds
    ridge = int(base / token) if token > base / 1e6 else 1000
    assert time_of(sessions, sessions) >= base + sessions * session
    assert time_of(1, min(ridge, 1000)) == pytest.approx(base + session, rel=1e-6, abs=1e-2 * token)
    assert time_of(1, 2 * ridge + 2) - time_of(1, ridge + 1) == pytest.approx(token * (ridge + 1), abs=1e-3 + token)
