"""Servers, command lines and requests of the integration tests: real processes, real sockets.

Starts `main.py` in its roles, and calls the gRPC GenerationService of servers. Models are tiny, with one thread each.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from specdec.comparison.run.proxy import DelayProxy
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.commit import Delta, Finished, FinishReason, Started
from specdec.inference.config import ROOT
from specdec.inference.serving.processes import ServerProcess, free_port, server_process
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import Completer, CompletionRequest
from specdec.inference.workers.drafting.private import PrivateWorker

PATIENT = ("--connect_timeout_s", "60")
"""Flags of a command that connects to a server: it waits up to 60 s, for a first handshake on a busy machine."""
DRAFTS = ("--drafting", "always")
"""Flags of a server whose draft tokens a test counts: it always drafts, even where that is slower than not drafting."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
NO_VARIABLES: Mapping[str, str] = {}


def target_server(model: Path, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    port = free_port()
    arguments = ("--model", str(model), "--port", str(port), "--threads", "1", *DRAFTS, *flags)
    return server_process("target", "target", *arguments, port=port)


def draft_server(model: Path | str, target: ServerProcess, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    """Start a server with the draft model (`draft --serve`), which lets `target` verify the draft tokens."""
    port = free_port()
    arguments = ("--model", str(model), "--port", str(target.port), "--serve", str(port), "--threads", "1")
    return server_process("draft", "draft", *arguments, *PATIENT, *flags, port=port)


def fused_server(target: Path, draft: Path, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    """Start a server with both models, which always drafts 4 tokens per round.

    Adaptive gamma would never draft with a draft model as large as those of the tests.
    """
    port = free_port()
    fixed = ("--no-adaptive_gamma", "--gamma", "4")
    models = ("--target_model", str(target), "--draft_model", str(draft))
    return server_process(
        "fused", "fused_target", *models, "--port", str(port), "--threads", "1", *DRAFTS, *fixed, *flags, port=port
    )


@asynccontextmanager
async def pool_worker(
    model: Path, *addresses: str, flags: tuple[str, ...] = ()
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Start a draft worker for the pools of the targets at these addresses; yield it once it has attached to all."""
    words = ("--role", "draft", "--model", model, "--threads", "1", *PATIENT, "--attach", ",".join(addresses))
    async with command(*words, *flags) as process, asyncio.timeout(60):
        await until_pooled(process, len(addresses))
        yield process


async def until_pooled(worker: asyncio.subprocess.Process, num_targets: int = 1) -> None:
    """Read the log of a draft worker until it has attached to this many targets; fail if the worker ends before."""
    assert worker.stderr is not None
    while num_targets:
        line = await worker.stderr.readline()
        assert line, "the worker has ended"
        num_targets -= b"attached as" in line


async def load_of(address: str) -> pb.GetLoadResponse:
    async with open_channel(address) as channel:
        load: pb.GetLoadResponse = await rpc.GenerationServiceStub(channel).GetLoad(pb.GetLoadRequest())
        return load


async def until_healthy(port: int) -> None:
    """Wait until /health on this port answers with success; raise TimeoutError after 120 s."""
    async with httpx.AsyncClient() as client, asyncio.timeout(120):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/health")).is_success:
                    return
            await asyncio.sleep(0.1)


async def pieces_over_http(port: int, body: Mapping[str, object]) -> AsyncGenerator[str, None]:
    """Send a completion request with streaming to the HTTP API on `port`; yield the text of each event."""
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


async def figure(metrics_port: int, name: str) -> float:
    """Return the value of a metric with one series from a server's /metrics; its labels do not matter."""
    async with httpx.AsyncClient() as client:
        figures = (await client.get(f"http://127.0.0.1:{metrics_port}/metrics")).text
    found = re.search(rf"^{name}{{.*}} (.*)$", figures, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def vocabulary_share(metrics_port: int) -> float:
    """Return the share (0 to 1) of the target's token ids that the draft can propose, from a server's /metrics."""
    return await figure(metrics_port, "specdec_draft_vocabulary_share")


@dataclass
class Completion:
    """Outcome of one request; tokens found by prompt lookup count as `num_lookup_tokens`, not as draft tokens.

    Attributes:
        num_branch_hits: how often the target chose a token that the draft had only as an alternative to its best guess.
        num_deltas: number of messages with new tokens.
        num_cached_tokens: prompt tokens whose keys and values were in the cache already.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_lookup_tokens: int = 0
    num_branch_hits: int = 0
    num_deltas: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    seed: int | None = None
    reason: FinishReason | None = None
    rejected: list[tuple[int, str]] = field(default_factory=list)  # of each pass: how many draft tokens, and their text

    def record(self, event: Started | Delta | Finished) -> None:
        if isinstance(event, Started):
            self.seed, self.num_prompt_tokens = event.seed, event.num_prompt_tokens
            self.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Finished):
            self.reason = event.reason
        else:
            self.token_ids += event.token_ids
            self.text += event.text
            self.num_draft_tokens += event.num_draft_tokens - event.own.num_lookup_tokens
            self.num_accepted_tokens += event.num_accepted_tokens - event.own.num_lookup_accepted
            self.num_lookup_tokens += event.own.num_lookup_tokens
            self.num_branch_hits += event.counts.num_branch_hits
            self.num_deltas += 1
            self.rejected.append((event.num_draft_tokens - event.num_accepted_tokens, event.rejected_text))


async def completed_by(completer: Completer, requests: Sequence[CompletionRequest]) -> list[Completion]:
    """Send requests to a completer, all at once; return their outcomes in the order of the requests."""

    async def one(request: CompletionRequest) -> Completion:
        completion = Completion()
        async for event in completer.complete(request):
            completion.record(event)
        return completion

    return list(await asyncio.gather(*map(one, requests)))


async def complete(server: ServerProcess | str, request: CompletionRequest) -> Completion:
    """Send one request by gRPC to a server, given as a process or an address; return its outcome."""
    (completion,) = await complete_all(server, [request])
    return completion


async def interrupted(
    server: ServerProcess | str | Completer,
    request: CompletionRequest,
    strikes: Mapping[int, Callable[[], Awaitable[None] | None]],
) -> Completion:
    """Complete a request, and call each function in `strikes` once the answer has as many tokens as its key says.

    Return the outcome; it is an AssertionError if the answer ends before all functions were called.
    """
    completion, due = Completion(), sorted(strikes)
    async with AsyncExitStack() as stack:
        if isinstance(server, ServerProcess | str):
            address = server if isinstance(server, str) else server.address
            channel = await stack.enter_async_context(open_channel(address))
            server = RemoteCompleter(channel, address, deadline_s=60.0)
        async for event in server.complete(request):
            completion.record(event)
            if due and len(completion.token_ids) >= due[0]:
                done = strikes[due.pop(0)]()
                if done is not None:
                    await done
    assert not due, "the answer ended too early"
    return completion


def cut_for(link: DelayProxy, seconds: float) -> Callable[[], None]:
    """Return a function that cuts the connections through a proxy, and lets them through again after `seconds`."""

    def strike() -> None:
        link.cut()
        asyncio.get_running_loop().call_later(seconds, link.restore)

    return strike


async def complete_all(
    server: ServerProcess | str, requests: Sequence[CompletionRequest], *, concurrency: int = 8
) -> list[Completion]:
    """Send requests by gRPC to a server, over one connection; return their outcomes in the order of the requests.

    At most `concurrency` requests are in flight at a time.
    """
    address = server if isinstance(server, str) else server.address
    places = asyncio.Semaphore(concurrency)
    async with open_channel(address) as channel:
        completer = RemoteCompleter(channel, address, deadline_s=60.0)

        async def one(request: CompletionRequest) -> Completion:
            async with places:
                return (await completed_by(completer, [request]))[0]

        return list(await asyncio.gather(*(one(request) for request in requests)))


def with_gamma(requests: Sequence[CompletionRequest], gamma: int) -> list[CompletionRequest]:
    return [replace(request, gamma=gamma) for request in requests]


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a program that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects in the standard output, which must have one on each line."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def last_line(self) -> str:
        return self.stderr.strip().splitlines()[-1]


@asynccontextmanager
async def command(
    *arguments: str | Path, program: str = "main.py", cwd: Path = ROOT, variables: Mapping[str, str] = NO_VARIABLES
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Run `main.py`, another program of this project, or a module ("-m NAME"); kill it when the block ends.

    The process gets the environment variables of ENVIRONMENT and `variables`.
    """
    started = program.split() if program.startswith("-m") else [str(ROOT / program)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *started, *map(str, arguments)),
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**ENVIRONMENT, **variables},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run_command(
    *arguments: str | Path,
    program: str = "main.py",
    timeout_s: float = 150.0,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> CommandResult:
    """Run `main.py`, or another program of this project, to its end; raise TimeoutError after `timeout_s` seconds."""
    async with command(*arguments, program=program, variables=variables) as process, asyncio.timeout(timeout_s):
        return await result_of(process)


async def result_of(process: asyncio.subprocess.Process) -> CommandResult:
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return CommandResult(process.returncode, stdout.decode(), stderr.decode())


async def until_attached(worker: PrivateWorker) -> None:
    """Wait until a client's own draft worker has attached to a target; raise TimeoutError after 60 s."""
    async with asyncio.timeout(60):
        while not any(stream.is_attached for stream, _ in worker._streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
