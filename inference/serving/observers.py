"""What watches the requests of a process besides its metrics, each if it is asked for: profile, spans, time-line."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc

from grpc_comm.spans import carrying
from inference.engine.loop import Engine
from inference.errors import ConfigError
from inference.observe.metrics import Metrics
from inference.observe.profile import Profile
from inference.observe.stats import RequestStats
from inference.observe.timeline import Trace
from inference.workers.completion import Completer
from inference.workers.observed import ObservedCompleter, Observer

if TYPE_CHECKING:
    from inference.observe.spans import Telemetry


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
        from inference.observe.spans import exporting
    except ImportError as exc:
        raise ConfigError(f"traces need OpenTelemetry ({exc}): {INSTALL}") from exc
    with exporting(f"specdec-{args.role}", endpoint) as telemetry:
        yield telemetry


def continuing(channel: grpc.aio.Channel, telemetry: Telemetry | None) -> grpc.aio.Channel:
    """The channel; with traces, its calls continue them at the other end."""
    return channel if telemetry is None else carrying(channel, telemetry.headers)


logger = logging.getLogger(__name__)


@contextmanager
def profiled(args: argparse.Namespace) -> Generator[Profile | None, None, None]:
    """A profile that is written when the block ends well; None without --profile."""
    if not args.profile:
        yield None
        return
    profile = Profile(args.role)
    yield profile
    report_profile(profile)


def report_profile(profile: Profile) -> None:
    """Write the profile's files into the current directory, and say where they are."""
    logger.info("profile: %s", " and ".join(str(path) for path in profile.write(Path())))


@contextmanager
def traced(args: argparse.Namespace, engine: Engine[Any, Any, Any]) -> Generator[None, None, None]:
    """Trace the engine's steps while the block runs; nothing without --trace."""
    if args.trace is None:
        yield
        return
    engine.trace = Trace(args.role)
    try:
        yield
    finally:
        engine.trace.write(args.trace)
        logger.info("trace: %s", args.trace)


@dataclass(frozen=True, slots=True)
class Observers:
    """Of one process; each may be None."""

    profile: Profile | None
    telemetry: Telemetry | None

    @property
    def annotate(self) -> Callable[[RequestStats], None] | None:
        """Says in the current span what a session cost."""
        return None if self.telemetry is None else self.telemetry.annotate

    def around(self, completer: Completer, metrics: Metrics, *, model: str) -> ObservedCompleter:
        """The completer, with whatever watches around it: the one place that says in which order."""
        if self.telemetry is not None:
            from inference.workers.traced import TracedCompleter

            completer = TracedCompleter(completer, self.telemetry, model=model)
        return ObservedCompleter(completer, Observer(metrics, self.profile))


@contextmanager
def observed(args: argparse.Namespace) -> Generator[Observers, None, None]:
    """What the flags ask for; written and sent when the block ends."""
    with profiled(args) as profile, exported(args) as telemetry:
        yield Observers(profile, telemetry)
