"""Which HTTP requests get a span, and how FastAPI, which makes it, is told so."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from fastapi.telemetry import TelemetryConfig

if TYPE_CHECKING:
    from inference.telemetry import Telemetry

PREFIX = "/v1/"


def http_spans(telemetry: Telemetry | None) -> TelemetryConfig:
    """Spans alone, which continue the trace that a client's headers name; none at all without `telemetry`."""
    if telemetry is None:
        return {"tracing": False, "metrics": False, "logs": False}
    return {
        "tracer_provider": telemetry.provider,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "exclude": _is_noise,
    }


def _is_noise(scope: MutableMapping[str, Any]) -> bool:
    """Health checks, scrapes, the page."""
    return scope["method"] != "POST" or not scope["path"].startswith(PREFIX)
