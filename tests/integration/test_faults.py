"""Tests of vanished clients, dead targets and full queues: slots (places for sequences) get free, tokens are right."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess, server_process
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.raw_worker import raw_worker
from tests.support.servers import DRAFTS, command, complete, load_of, result_of, target_server

pytestmark = pytest.mark.slow

LONG = 8000  # tokens; a holder of the only slot would keep it for 10 seconds and more
PROMPT_S = 5.0  # what counts as prompt, on a busy machine
SMALL = ("--sequence_length", "8192", "--batch", "1")
IN_ROUNDS = pb.GenerateRequest(text="the wind", max_new_tokens=5, gamma=4, schedule=pb.SCHEDULE_SYNC)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(models: ModelDirectories) -> AsyncGenerator[ServerProcess, None]:
    """Start a target that runs one request at a time, and queues one more."""
    async with target_server(models.endless, *SMALL, "--max_waiting", "1") as server:
        yield server


@asynccontextmanager
async def generating(
    server: ServerProcess, num_tokens: int = LONG, *, timeout_s: float = 60.0
) -> AsyncGenerator[Any, None]:
    """Send a request; yield its call once the answer has begun, so that the request occupies a slot of the server."""
    async with queued(server, num_tokens, timeout_s=timeout_s) as call:
        for _ in range(3):
            await call.read()
        yield call


@asynccontextmanager
async def queued(server: ServerProcess, num_tokens: int = 3, *, timeout_s: float = 60.0) -> AsyncGenerator[Any, None]:
    """Send a request, and yield its call at once; the request waits in the server's queue if no slot is free."""
    request = pb.GenerateRequest(text="the wind", max_new_tokens=num_tokens)
    async with open_channel(server.address) as channel:
        call = rpc.GenerationServiceStub(channel).Generate(request, timeout=timeout_s)
        try:
            yield call
        finally:
            call.cancel()


async def assert_serves_promptly(server: ServerProcess) -> None:
    started = time.monotonic()
    completion = await complete(server, CompletionRequest("hello", max_new_tokens=3))
    assert len(completion.token_ids) == 3
    assert time.monotonic() - started < PROMPT_S


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    """Read the rest of a stream; return its messages."""
    messages = []
    while (message := await call.read()) != grpc.aio.EOF:
        messages.append(message)
    return messages


async def test_cancelled_generation_frees_its_slot(small: ServerProcess) -> None:
    async with generating(small) as call:
        call.cancel()
        await assert_serves_promptly(small)


async def test_cancelled_rounds_free_their_slot(small: ServerProcess) -> None:
    """When a client leaves while the target waits for its draft tokens, the request's slot at the target gets free."""
    async with raw_worker(small.address) as worker:
        session = worker.request(IN_ROUNDS).send()
        await session.propose()
        await session.delta()
        session.call.cancel()
        await assert_serves_promptly(small)


async def test_passed_deadline_frees_the_slot(small: ServerProcess) -> None:
    async with queued(small, LONG, timeout_s=1.0) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await assert_serves_promptly(small)


async def test_killed_draft_worker_frees_the_slot(small: ServerProcess, models: ModelDirectories) -> None:
    """When a draft worker dies in the middle of its own request, the closed connection frees the request's slot."""
    arguments = ("--model", models.endless, "--port", str(small.port), "--prompt", "x", "--max_new_tokens", str(LONG))
    async with command("--role", "draft", *arguments) as process:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readexactly(50), timeout=60)  # prompt and the first of the answer
        process.kill()
        await process.wait()
        await assert_serves_promptly(small)


async def test_full_queue_is_refused_with_a_hint(small: ServerProcess) -> None:
    """If one request runs and one waits, a third is refused with a time to retry, and the server goes on as before."""
    async with generating(small) as running, queued(small) as waiting:
        await until_load(small, waiting=1)
        refusal = await refused(small)
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 slots" in (refusal.details() or "")
        status = rpc_status.from_call(refusal)
        assert status is not None
        hint = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(hint)
        assert hint.retry_delay.ToMilliseconds() > 0
        running.cancel()
        assert (await read_all(waiting))[-1].HasField("finished")
    await assert_serves_promptly(small)


async def until_load(server: ServerProcess, *, running: int = 1, waiting: int = 0) -> None:
    """Wait until the server reports these numbers of running and of waiting requests."""
    async with asyncio.timeout(60):
        while ((load := await load_of(server.address)).num_running, load.num_waiting) != (running, waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def refused(server: ServerProcess) -> Any:
    """Send one more request, which the server must refuse at once; return the error."""
    async with queued(server) as call, asyncio.timeout(PROMPT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
    return caught.value


async def test_silent_draft_and_sigterm(models: ModelDirectories) -> None:
    """A target that waits for a silent draft worker goes on without it; on SIGTERM it ends its requests and exits."""
    flags = (*SMALL, "--idle_timeout_s", "1", "--grace_s", "60")
    async with target_server(models.endless, *flags) as server:
        async with raw_worker(server.address) as worker:
            session = worker.request(IN_ROUNDS).send()
            assert await worker.closed() == session.name.hex()
            assert len(await session.rest()) == 5
        assert "no proposal came for 1 s" in server.log.read_text()
        await assert_serves_promptly(server)
        await drain(server)


async def drain(server: ServerProcess) -> None:
    """Send a server SIGTERM while a request runs, and check how it shuts down.

    Its health check must fail, new requests be refused, the running one end normally, and the exit code be 0.
    """
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(generating(server, 2000))  # far longer than a slow test takes
        channel = await stack.enter_async_context(open_channel(server.address))
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        refusal = await refused(server)
        assert refusal.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in refusal.details()
        messages = await read_all(running)
        assert messages[-1].WhichOneof("event") == "finished"
    async with asyncio.timeout(60):
        assert await server.process.wait() == 0
    assert "Traceback" not in server.log.read_text()


async def test_target_that_comes_back_resumes_the_request(models: ModelDirectories) -> None:
    """When a target is killed and restarted on its port, the answer goes on, with no token lost or repeated."""
    num_tokens = 800
    asked = ("--prompt", "x", "--temperature", "1", "--seed", "5", "--max_new_tokens", str(num_tokens))
    flags = (*asked, "--format", "json", "--reconnect_timeout_s", "60", "--model", models.endless)
    async with target_server(models.endless, *SMALL, "--max_waiting", "0") as target:
        port = ("--port", str(target.port))
        async with command("--role", "draft", *flags, *port) as process:
            await until_load(target)
            await asyncio.sleep(0.1)
            target.process.kill()
            again = ("--model", str(models.endless), *port, "--threads", "1", *DRAFTS, *SMALL)
            async with server_process("again", "target", *again, port=target.port) as revived:
                result = await result_of(process)
                sampling = SamplingParams(temperature=1.0)
                alone = await complete(revived, CompletionRequest("x", sampling, seed=5, max_new_tokens=num_tokens))
                assert revived.process.returncode is None
    assert result.code == 0
    assert "goes on after" in result.stderr
    assert result.objects[0]["token_ids"] == alone.token_ids
    assert len(result.objects[0]["token_ids"]) == num_tokens


async def test_health_and_reflection(small: ServerProcess) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    services = ("specdec.v1.GenerationService", "specdec.v1.VerificationService")
    async with open_channel(small.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", *services):
            response = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        (answer,) = [message async for message in reflection.ServerReflectionInfo(iter([question]), timeout=60)]
        names = {service.name for service in answer.list_services_response.service}
        assert {*services, "grpc.health.v1.Health"} <= names
