"""Traces of a server, if its flags or the environment name a collector."""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import grpc

from grpc_comm.telemetry import carrying
from inference.errors import ConfigError

if TYPE_CHECKING:
    from inference.telemetry import Telemetry

INSTALL = "pip install -r requirements-tracing.txt"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@contextmanager
def exported(args: argparse.Namespace) -> Generator[Telemetry | None, None, None]:
    """Export traces while the block runs; None, and nothing is imported, unless a collector is named.

    Raises:
        ConfigError: the URL is none, or the packages are not installed.
    """
    endpoint: str | None = args.otlp_endpoint
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINTS):
        yield None
        return
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(f"--otlp_endpoint {endpoint} is no http or https URL, such as http://localhost:4317")
    try:
        from inference.telemetry import exporting
    except ImportError as exc:
        raise ConfigError(f"traces need OpenTelemetry ({exc}): {INSTALL}") from exc
    with exporting(f"specdec-{args.role}", endpoint) as telemetry:
        yield telemetry


def continuing(channel: grpc.aio.Channel, telemetry: Telemetry | None) -> grpc.aio.Channel:
    """The channel; with traces, its calls continue them at the other end."""
    return channel if telemetry is None else carrying(channel, telemetry.headers)
