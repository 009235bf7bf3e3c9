"""Passes asleep: as long as was said, whatever their width, and the same model otherwise."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

from inference.backends.registry import load_backend
from inference.config import NOT_EMULATED, Emulation, ModelConfig
from inference.errors import ConfigError
from inference.model.slots import ForkingBackend, Span
from tests.support.models import save_tiny_model

PASS_S = 0.05


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("target:25ms,draft:3ms", Emulation(0.025, 0.003)),
        ("draft:0.5ms", Emulation(0.0, 0.0005)),
        (" target:7ms", Emulation(0.007, 0.0)),
        ("target:0ms", NOT_EMULATED),
    ],
)
def test_what_is_said_is_read_and_said_again(text: str, expected: Emulation) -> None:
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
        slow = load_backend(ModelConfig(path, backend=backend, num_slots=2, num_threads=1, pass_s=PASS_S))
    assert "EMULATED: a pass of model" in caplog.text
    for spans in ([Span(0, 0, [1], 1)], [Span(0, 0, [1, 2, 3], 3), Span(1, 0, [4, 5], 1)]):
        started = time.monotonic()
        logits = slow.forward(spans)
        assert time.monotonic() - started >= PASS_S
        np.testing.assert_array_equal(np.asarray(logits), np.asarray(plain.forward(spans)))
    assert isinstance(slow, ForkingBackend) == isinstance(plain, ForkingBackend)
    assert getattr(slow, "arithmetic", None) == getattr(plain, "arithmetic", "") != ""


def test_a_device_is_not_emulated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backend neuron has a device"):
        ModelConfig(save_tiny_model(tmp_path, "llama"), backend="neuron", pass_s=PASS_S)
