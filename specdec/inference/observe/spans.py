"""OpenTelemetry traces: one request is one trace, through all processes that it passes.

The attributes of spans are named as in OpenTelemetry's conventions for GenAI and in vLLM. This module knows neither
gRPC nor HTTP: their headers come as mappings. It is imported only when traces are asked for, since its packages are
optional (requirements/tracing.txt).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, use_span
from opentelemetry.util.types import AttributeValue

from specdec.inference import VERSION
from specdec.inference.observe.stats import RequestStats

EXPORT_TIMEOUT_S = 2.0
"""Longest export in seconds: a collector that does not answer must not hold up the end of a server."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP_PATH = "/v1/traces"


class Spans:
    """Source of the trace spans of one process.

    Args:
        provider: OpenTelemetry's source of tracers, which exports the spans.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer("specdec", VERSION)

    def server_span(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, AttributeValue]
    ) -> AbstractContextManager[Span]:
        """Open the span of an incoming call, and make it the current span of this task during the block.

        Args:
            name: name of the call.
            headers: headers of the call, in which the caller's trace may stand.
            attributes: attributes of the span.
        """
        return self._tracer.start_as_current_span(name, propagate.extract(headers), SpanKind.SERVER, attributes)

    @contextmanager
    def generation(self, attributes: Mapping[str, AttributeValue]) -> Generator[GenerationSpan, None, None]:
        """Open the span of one sequence, but do not make it current, since several tasks run parts of the block."""
        span = self._tracer.start_span("generate", attributes=attributes)
        try:
            yield GenerationSpan(span)
        except Exception as exc:
            span.record_exception(exc)
            span.set_status(Status(StatusCode.ERROR, f"{type(exc).__name__}: {exc}"))
            raise
        finally:
            span.end()

    def headers(self) -> dict[str, str]:
        """Return the headers that make the receiver of a call continue the current trace."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier

    def annotate(self, stats: RequestStats) -> None:
        """Write the figures of a sequence into the current span."""
        get_current_span().set_attributes(usage(stats))


def usage(stats: RequestStats) -> dict[str, AttributeValue]:
    """Return the tokens, seconds and speculation figures of one sequence as attributes of a span."""
    return {
        "gen_ai.usage.prompt_tokens": stats.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": stats.num_output_tokens,
        "gen_ai.latency.time_to_first_token": stats.ttft_s,
        "gen_ai.latency.e2e": stats.end_to_end_s,
        "gen_ai.latency.time_in_queue": stats.timings[0].queue_us / 1e6 if stats.timings else 0.0,
        "specdec.num_passes": len(stats.arrivals),
        "specdec.num_draft_tokens": stats.num_draft_tokens,
        "specdec.num_accepted_tokens": stats.num_accepted_tokens,
    }


class GenerationSpan:
    """Span of one sequence that is generated; calls that are made while it is current get spans below it."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def current(self) -> AbstractContextManager[object]:
        """Make the span current during the block, and leave it open."""
        return use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False)

    def finished(self, reason: str) -> None:
        """Add the reason why the sequence ended."""
        self._span.set_attribute("gen_ai.response.finish_reasons", (reason,))

    def annotate(self, stats: RequestStats) -> None:
        """Write the figures of the sequence into the span."""
        self._span.set_attributes(usage(stats))


@contextmanager
def exporting(service: str, endpoint: str | None) -> Generator[Spans, None, None]:
    """Send spans to a collector while the block runs; send the rest at its end.

    Args:
        service: name of this process, unless the environment has one (OTEL_SERVICE_NAME).
        endpoint: URL of the collector; None: the environment's (OTEL_EXPORTER_OTLP_ENDPOINT).
    """
    provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    try:
        yield Spans(provider)
    finally:
        sending = threading.Thread(target=provider.shutdown, daemon=True)  # a batch after another, each with its time
        sending.start()
        sending.join(EXPORT_TIMEOUT_S)


def _resource(service: str) -> Resource:
    named = "OTEL_SERVICE_NAME" in os.environ or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {SERVICE_NAME: service})


def _exporter(endpoint: str | None) -> SpanExporter:
    protocol = next((os.environ[name] for name in _PROTOCOLS if name in os.environ), "grpc")
    timeout_s = None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else EXPORT_TIMEOUT_S
    if protocol.startswith("http"):
        if endpoint is not None and not endpoint.endswith(_HTTP_PATH):
            endpoint = endpoint.rstrip("/") + _HTTP_PATH  # as the SDK does with the environment's URL
        return HttpExporter(endpoint, timeout=timeout_s)
    return GrpcExporter(endpoint, timeout=timeout_s)
