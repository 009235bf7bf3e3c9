"""Tests of OpenTelemetry traces: one request is one trace through gateway, draft server and target."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc

from specdec.inference.serving.processes import free_port
from tests.conftest import ModelDirectories
from tests.integration.test_gateway import gateway_process
from tests.support.servers import draft_server, run_command, target_server

pytestmark = pytest.mark.long

TRACES = {"0af7651916cd43dd8448eb211c80319c": False, "1af7651916cd43dd8448eb211c80319c": True}
"""Trace ids of the requests that the test sends; the value is True if the request's answer is streamed."""
CHAIN = (
    ("specdec-gateway", "POST /v1/completions"),
    ("specdec-gateway", "generate"),
    ("specdec-draft", "specdec.v1.GenerationService/Generate"),
    ("specdec-draft", "generate"),
    ("specdec-target", "specdec.v1.GenerationService/Generate"),
    ("specdec-target", "generate"),
)
CLIENT_SPAN = "b7ad6b7169203331"
BODY = {"prompt": "the wind and the sea", "max_tokens": 12, "temperature": 0.5, "seed": 1}


@dataclass(frozen=True)
class Span:
    """An OpenTelemetry span that the collector has got; `service` is the name of the process that sent it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


@dataclass
class Collector(otlp_rpc.TraceServiceServicer):
    """OpenTelemetry collector that stores the spans it gets from all processes."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    async def Export(self, request: Any, context: object) -> Any:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                self.spans.append(Span(service, span.name, *ids, _attributes(span.attributes)))
        return otlp.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncGenerator[Collector, None]:
    collector, server = Collector(), grpc.aio.server()
    otlp_rpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


async def test_one_request_is_one_trace(models: ModelDirectories) -> None:
    """One request is one trace through all processes.

    The span of each process is a child of the span of the process before it, and the gateway's is a child of the
    client's. All spans have arrived when the processes have ended.
    """
    async with collecting() as collector:
        flags = ("--otlp_endpoint", collector.endpoint)
        async with AsyncExitStack() as stack:
            target = await stack.enter_async_context(target_server(models.target, *flags))
            draft = await stack.enter_async_context(draft_server(models.related, target, "--schedule", "sync", *flags))
            port = await stack.enter_async_context(gateway_process(draft, *flags))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for trace_id, stream in TRACES.items():
                    headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}
                    response = await client.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
                    assert response.status_code == 200
                await client.get("/v1/models")
        for trace_id in TRACES:
            check_trace([span for span in collector.spans if span.trace_id == trace_id])
        assert sum(span.service == "specdec-gateway" for span in collector.spans) == 4, "no span of other HTTP"


def check_trace(spans: list[Span]) -> None:
    """Check that one request's spans, from the gateway's to the target's, each have the one before as their parent."""
    chain = [next(span for span in spans if (span.service, span.name) == place) for place in CHAIN]
    assert len(spans) == len(chain)
    assert [span.parent_id for span in chain] == [CLIENT_SPAN, *(span.span_id for span in chain[:-1])]
    http, asked, _, drafted, _, verified = chain
    assert http.attributes["http.response.status_code"] == 200
    for span in (asked, drafted, verified):
        assert span.attributes["gen_ai.request.max_tokens"] == 12
        assert span.attributes["gen_ai.request.temperature"] == 0.5
        assert span.attributes["gen_ai.usage.completion_tokens"] == 12
        assert 0 < span.attributes["gen_ai.latency.time_to_first_token"] <= span.attributes["gen_ai.latency.e2e"]
        assert span.attributes["specdec.num_draft_tokens"] > 0


async def test_without_the_flag_no_tracing_library_is_loaded() -> None:
    code = "import sys, specdec.inference.serving.target, specdec.inference.serving.edge\n"
    code += "print('opentelemetry.sdk' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.strip() == b"False"


async def test_a_collector_must_be_a_url() -> None:
    result = await run_command("--role", "target", "--otlp_endpoint", "localhost:4317", "--port", str(free_port()))
    assert result.code == 2
    assert "--otlp_endpoint localhost:4317" in result.last_line
