"""Tracing and the metrics port need no package unless they are used; the error about a missing package names it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from specdec.inference.config import ObserveConfig
from specdec.inference.errors import ConfigError
from specdec.inference.serving.observers import INSTALL, observed

ENVIRONMENT = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def config(endpoint: str | None) -> ObserveConfig:
    return ObserveConfig("target", otlp_endpoint=endpoint)


def test_there_is_nothing_unless_a_collector_is_named() -> None:
    with observed(config(None)) as observers:
        assert observers.spans is None


@pytest.mark.parametrize("endpoint", ["http://localhost:4317", None])
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, endpoint: str | None) -> None:
    """The error names the packages missing for traces, even if only an environment variable asks for traces."""
    if endpoint is None:
        monkeypatch.setenv(ENVIRONMENT[0], "http://localhost:4317")
    monkeypatch.setitem(sys.modules, "specdec.inference.observe.spans", None)
    with pytest.raises(ConfigError, match=INSTALL), observed(config(endpoint)):
        pass


def test_a_silent_collector_does_not_delay_the_end() -> None:
    """A collector of traces that does not answer does not delay the end of a server.

    Regression: after a server had drained, each batch of spans waited two seconds for a silent collector.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with observed(config(f"http://127.0.0.1:{silent.getsockname()[1]}")) as observers:
            assert observers.spans is not None
            for _ in range(2000):
                with observers.spans.generation({}):
                    pass
            began = time.monotonic()
        assert time.monotonic() - began < 5


def test_the_port_for_metrics_needs_no_fastapi() -> None:
    """The port for metrics works without FastAPI.

    Regression: beside vLLM's older FastAPI, a target with --metrics_port loaded its model and then failed.
    """
    code = (
        "import sys; sys.modules['fastapi'] = None; from specdec.inference.gateway.door.middleware import HttpGate; "
        "from specdec.inference.gateway.door.port import Probes, SidePort; import specdec.inference.serving.target"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
