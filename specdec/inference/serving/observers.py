"""What a process records about its requests, if the configuration asks for it: a profile, trace spans, a time-line."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from specdec.inference.config import ObserveConfig
from specdec.inference.errors import ConfigError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.observe.profile import Profile
from specdec.inference.observe.timeline import Timeline
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.completion import Completer

if TYPE_CHECKING:
    from specdec.inference.observe.spans import Spans

logger = logging.getLogger(__name__)

INSTALL = "pip install -r requirements/tracing.txt"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(frozen=True, slots=True)
class Observers:
    """Profile of one process, and its source of trace spans; each is None unless the configuration asks for it."""

    config: ObserveConfig
    profile: Profile | None
    spans: Spans | None

    def around(self, completer: Completer, metrics: Metrics, *, model: str) -> SupervisedCompleter:
        """Return `completer` in a wrapper that adds trace spans, metrics, limits and deadlines to its requests."""
        return SupervisedCompleter(completer, Observer(metrics, self.profile), self.spans, model=model)

    def open_span(
        self, name: str, headers: Mapping[str, str], attributes: dict[str, str]
    ) -> AbstractContextManager[object]:
        """Return the trace span around an incoming gRPC call, or a context manager that does nothing without traces."""
        return nullcontext() if self.spans is None else self.spans.server_span(name, headers, attributes)

    def headers(self) -> dict[str, str]:
        """Return headers for a call, by which its receiver continues the current trace; none without traces."""
        return {} if self.spans is None else self.spans.headers()


class Timed(Protocol):
    """Interface of an engine that can record its steps.

    Attributes:
        timeline: recorder of the steps; None: nothing is recorded.
    """

    timeline: Timeline | None


@contextmanager
def timeline(config: ObserveConfig, engine: Timed) -> Generator[None, None, None]:
    """If the configuration names a file for a time-line, record the engine's steps during the block, and write it."""
    if config.timeline is None:
        yield
        return
    engine.timeline = Timeline(config.role)
    try:
        yield
    finally:
        engine.timeline.write(config.timeline)
        logger.info("trace: %s", config.timeline)


@contextmanager
def observed(config: ObserveConfig) -> Generator[Observers, None, None]:
    """Yield the observers that the configuration asks for; at the end of the block write files, and send spans."""
    with _profiled(config) as profile, _exported(config) as spans:
        yield Observers(config, profile, spans)


@contextmanager
def _profiled(config: ObserveConfig) -> Generator[Profile | None, None, None]:
    """Yield a profile if the configuration asks for one, else None; write it when the block ends, even by an error."""
    if not config.profile:
        yield None
        return
    profile = Profile(config.role)
    try:
        yield profile
    finally:
        report_profile(profile)


def report_profile(profile: Profile) -> None:
    """Write the profile's files into the current directory, and log their paths."""
    logger.info("profile: %s", " and ".join(str(path) for path in profile.write(Path())))


@contextmanager
def _exported(config: ObserveConfig) -> Generator[Spans | None, None, None]:
    """Yield a source of trace spans, which are sent to a collector during the block; None if no collector is named.

    Raises:
        ConfigError: the collector's address is not a URL, or OpenTelemetry is not installed.
    """
    endpoint = config.otlp_endpoint
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINTS):
        yield None
        return
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(f"--otlp_endpoint {endpoint} is not an http or https URL, such as http://localhost:4317")
    try:
        from specdec.inference.observe.spans import exporting
    except ImportError as exc:
        raise ConfigError(f"traces need OpenTelemetry ({exc}): {INSTALL}") from exc
    with exporting(f"specdec-{config.role}", endpoint) as spans:
        yield spans
