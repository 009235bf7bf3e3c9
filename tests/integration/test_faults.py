"""Clients that vanish, targets that die, queues that are full: slots are freed, errors are clear, tokens are kept."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
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
from specdec.inference.serving.processes import ServerProcess, free_port, server_process
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.raw_worker import raw_worker
from tests.support.servers import command, complete, complete_all, draft_server, result_of, run_command, target_server

pytestmark = pytest.mark.slow

LONG = 8000  # tokens; a holder of the only slot would keep it for 10 seconds and more
PROMPT_S = 5.0  # what counts as prompt, on a busy machine
SMALL = ("--sequence_length", "8192", "--batch", "1")
IN_ROUNDS = pb.GenerateRequest(text="the wind", max_new_tokens=5, gamma=4, schedule=pb.SCHEDULE_SYNC)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(models: ModelDirectories) -> AsyncGenerator[ServerProcess, None]:
    """Start a target with one slot and one place in the queue."""
    async with target_server(models.endless, *SMALL, "--max_waiting", "1") as server:
        yield server


@asynccontextmanager
async def generating(
    server: ServerProcess, num_tokens: int = LONG, *, timeout_s: float = 60.0
) -> AsyncGenerator[Any, None]:
    """Yield a call that has its slot and is in the middle of its stream."""
    async with queued(server, num_tokens, timeout_s=timeout_s) as call:
        for _ in range(3):
            await call.read()
        yield call


@asynccontextmanager
async def queued(server: ServerProcess, num_tokens: int = 3, *, timeout_s: float = 60.0) -> AsyncGenerator[Any, None]:
    """Yield a call that was sent."""
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
    """Return the messages that are left."""
    messages = []
    while (message := await call.read()) != grpc.aio.EOF:
        messages.append(message)
    return messages


async def test_cancelled_generation_frees_its_slot(small: ServerProcess) -> None:
    async with generating(small) as call:
        call.cancel()
        await assert_serves_promptly(small)


async def test_cancelled_rounds_free_their_slot(small: ServerProcess) -> None:
    """The client leaves while the target waits for a proposal of its draft worker."""
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
    """A draft worker dies by SIGKILL in mid-stream: the closed connection is enough, no timeout has to pass."""
    arguments = ("--model", models.endless, "--port", str(small.port), "--prompt", "x", "--max_new_tokens", str(LONG))
    async with command("--role", "draft", *arguments) as process:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readexactly(50), timeout=60)  # prompt and the first of the answer
        process.kill()
        await process.wait()
        await assert_serves_promptly(small)


async def test_full_queue_is_refused_with_a_hint(small: ServerProcess) -> None:
    """A request runs, one waits, and the third is refused with a time to come again and leaves no trace."""
    async with generating(small) as running, queued(small) as waiting:
        await until_one_waits(small)
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


async def test_cancelled_waiter_frees_its_place(small: ServerProcess) -> None:
    async with generating(small) as running:
        async with queued(small):
            await until_one_waits(small)
            await refused(small)
        await until_one_waits(small, num_waiting=0)
        async with queued(small) as waiting:
            await until_one_waits(small)
            running.cancel()
            assert (await read_all(waiting))[-1].HasField("finished")


async def until_one_waits(server: ServerProcess, *, num_waiting: int = 1) -> None:
    """Wait until so many requests are in the server's queue."""
    async with open_channel(server.address) as channel, asyncio.timeout(20):
        stub = rpc.GenerationServiceStub(channel)
        while (await stub.GetLoad(pb.GetLoadRequest())).num_waiting != num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def refused(server: ServerProcess) -> Any:
    """Send one more request and return its error, which comes at once."""
    async with queued(server) as call, asyncio.timeout(PROMPT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
    return caught.value


async def test_client_comes_again_when_the_server_was_full(small: ServerProcess, tmp_path: Any) -> None:
    """Four prompts come at once for one slot and one place: the command line waits as refusals ask; all are served."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\nthree\nfour\n")
    flags = ("--port", str(small.port), "--prompt_text", file, "--max_new_tokens", "400", "--format", "json")
    result = await run_command("--role", "fused_client", *flags)
    assert result.code == 0
    assert [fields["prompt"] for fields in result.objects] == ["one", "two", "three", "four"]
    assert all(len(fields["token_ids"]) == 400 for fields in result.objects)


async def test_second_server_on_a_port(small: ServerProcess, models: ModelDirectories) -> None:
    result = await run_command("--role", "target", "--model", models.target, "--port", str(small.port))
    assert result.code == 2
    assert result.last_line.startswith(f"error: cannot listen on 127.0.0.1:{small.port}")
    assert "Traceback" not in result.stderr
    await assert_serves_promptly(small)


async def test_unreachable_target() -> None:
    port = free_port()
    flags = ("--port", str(port), "--prompt", "x", "--connect_timeout_s", "1")
    result = await run_command("--role", "fused_client", *flags)
    assert (result.code, result.stdout) == (1, "")
    assert result.last_line == f"error: no server answers at 127.0.0.1:{port} within 1 s"


async def test_silent_draft_and_sigterm(models: ModelDirectories) -> None:
    """A server's last minutes: a request in rounds goes on without its silent worker; SIGTERM drains, exit code 0."""
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
    """Drain by SIGTERM: unhealthy at once, new requests refused, the running one finishes, exit code 0."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(generating(server, 4000))  # far longer than a slow test takes
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
    async with asyncio.timeout(30):
        assert await server.process.wait() == 0
    assert "Traceback" not in server.log.read_text()


async def test_target_that_dies_leaves_what_was_generated(models: ModelDirectories) -> None:
    async with dying_target(models) as (target, port):
        async with drafting(models, port, "--reconnect_timeout_s", "0") as process:
            await until_busy(target)
            await asyncio.sleep(0.5)
            target.process.kill()
            result = await result_of(process)
        assert result.code == 1
        (fields,) = result.objects
        assert fields["error"]["code"] == "UNAVAILABLE"
        assert f"127.0.0.1:{port}" in fields["error"]["message"]
        assert fields["finish_reason"] is None
        assert 0 < len(fields["token_ids"]) < LONG
        assert fields["text"]


async def test_target_that_comes_back_resumes_the_request(models: ModelDirectories) -> None:
    """Killed and started anew on its port, the target goes on with the same tokens: none is lost, none comes twice."""
    num_tokens = 1500
    async with dying_target(models) as (target, port):
        flags = (
            "--reconnect_timeout_s",
            "60",
            "--temperature",
            "1",
            "--seed",
            "5",
            "--max_new_tokens",
            str(num_tokens),
        )
        async with drafting(models, port, *flags) as process:
            await until_busy(target)
            await asyncio.sleep(0.1)
            target.process.kill()
            async with revived_target(models, port) as again:
                result = await result_of(process)
                sampling = SamplingParams(temperature=1.0)
                alone = await complete(again, CompletionRequest("x", sampling, seed=5, max_new_tokens=num_tokens))
                assert again.process.returncode is None
    assert result.code == 0
    assert "goes on after" in result.stderr
    assert result.objects[0]["token_ids"] == alone.token_ids
    assert len(result.objects[0]["token_ids"]) == num_tokens


async def test_another_model_does_not_continue_a_text(models: ModelDirectories) -> None:
    """The story: one model began a text and another ended it, without a word.

    The target had been restarted with other weights of the same tokenizer.
    """
    async with (
        dying_target(models) as (target, port),
        draft_server(models.endless, target, "--sequence_length", "8192", "--reconnect_timeout_s", "60") as draft,
        generating(draft) as stream,
    ):
        target.process.kill()
        arguments = ("--model", str(models.target), "--port", str(port), "--threads", "1", "--batch", "1")
        async with server_process("again", "target", *arguments, port=port):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await read_all(stream)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "cannot resume" in str(refusal.value.details())


@asynccontextmanager
async def dying_target(models: ModelDirectories) -> AsyncGenerator[tuple[ServerProcess, int], None]:
    """Start a target that the test is going to kill, with one slot and no queue."""
    async with target_server(models.endless, *SMALL, "--max_waiting", "0") as server:
        yield server, server.port


@asynccontextmanager
async def revived_target(models: ModelDirectories, port: int) -> AsyncGenerator[ServerProcess, None]:
    flags = ("--model", str(models.endless), "--port", str(port), "--threads", "1", *SMALL)
    async with server_process("again", "target", *flags, port=port) as server:
        yield server


@asynccontextmanager
async def drafting(
    models: ModelDirectories, port: int, *flags: str
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Run the command line up to the middle of a long request."""
    common = ("--model", str(models.endless), "--port", str(port), "--prompt", "x", "--max_new_tokens", str(LONG))
    async with command("--role", "draft", *common, "--format", "json", *flags) as process:
        yield process


async def until_busy(server: ServerProcess) -> None:
    """Wait until another client holds the only slot of a server without a queue, which then refuses us."""
    async with asyncio.timeout(60):
        while True:
            async with queued(server, 1) as probe:
                with suppress(grpc.aio.AioRpcError):
                    await read_all(probe)
                if await probe.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    return
            await asyncio.sleep(0.05)


async def test_health_and_reflection(small: ServerProcess) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    services = ("specdec.v1.GenerationService", "specdec.v1.VerificationService")
    async with open_channel(small.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", *services):
            response = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        (answer,) = [message async for message in reflection.ServerReflectionInfo(iter([question]), timeout=10)]
        names = {service.name for service in answer.list_services_response.service}
        assert {*services, "grpc.health.v1.Health"} <= names


async def test_eight_at_once_on_one_slot_in_order(models: ModelDirectories, small: ServerProcess) -> None:
    """Patient clients are served, one after another."""
    requests = [CompletionRequest(f"{number}", max_new_tokens=5) for number in range(8)]
    completions = await complete_all(small, requests, concurrency=2)
    assert all(len(completion.token_ids) == 5 for completion in completions)
