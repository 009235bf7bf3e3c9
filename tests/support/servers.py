"""Servers, command lines and requests of the integration tests: real processes, real sockets.

Owns the start of `main.py` and the calls of a GenerationService. Models are tiny (models.py), with one thread each.
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
"""Flags of a command that connects to a server: on a busy machine a first handshake may take more than the default."""
DRAFTS = ("--drafting", "always")
"""Flags of a server whose drafts a test counts: it also uses drafts that are slower than none on the test's machine."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
NO_VARIABLES: Mapping[str, str] = {}


def target_server(model: Path, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    port = free_port()
    arguments = ("--model", str(model), "--port", str(port), "--threads", "1", *DRAFTS, *flags)
    return server_process("target", "target", *arguments, port=port)


def draft_server(model: Path | str, target: ServerProcess, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    """Start a draft worker that serves requests itself (`draft --serve`), and has them verified by `target`."""
    port = free_port()
    arguments = ("--model", str(model), "--port", str(target.port), "--serve", str(port), "--threads", "1")
    return server_process("draft", "draft", *arguments, *PATIENT, *flags, port=port)


def fused_server(target: Path, draft: Path, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    """Start a fused pair with gamma 4, without adaptive drafting, which would never use a draft that large."""
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
    """Start a pool worker, and wait until it has attached to the targets at all addresses."""
    words = ("--role", "draft", "--model", model, "--threads", "1", *PATIENT, "--attach", ",".join(addresses))
    async with command(*words, *flags) as process, asyncio.timeout(60):
        await until_pooled(process, len(addresses))
        yield process


async def until_pooled(worker: asyncio.subprocess.Process, num_targets: int = 1) -> None:
    """Read the messages of a draft worker until it has attached to so many targets."""
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
    """Wait until a server's /health succeeds."""
    async with httpx.AsyncClient() as client, asyncio.timeout(120):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/health")).is_success:
                    return
            await asyncio.sleep(0.1)


async def pieces_over_http(port: int, body: Mapping[str, object]) -> AsyncGenerator[str, None]:
    """Send a streaming completion request; yield the text of each event."""
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


async def figure(metrics_port: int, name: str) -> float:
    """Return a metric's value from a server's metrics port; the metric's only label must be the model's name."""
    async with httpx.AsyncClient() as client:
        figures = (await client.get(f"http://127.0.0.1:{metrics_port}/metrics")).text
    found = re.search(rf"^{name}{{.*}} (.*)$", figures, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def vocabulary_share(metrics_port: int) -> float:
    """Return, from the metrics, the share of the target's token ids that the draft can propose."""
    return await figure(metrics_port, "specdec_draft_vocabulary_share")


@dataclass
class Completion:
    """Outcome of one request; its counts of draft tokens leave out prompt lookup."""

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
    """Send requests to a completer, all at once; return their outcomes in order."""

    async def one(request: CompletionRequest) -> Completion:
        completion = Completion()
        async for event in completer.complete(request):
            completion.record(event)
        return completion

    return list(await asyncio.gather(*map(one, requests)))


async def complete(server: ServerProcess | str, request: CompletionRequest) -> Completion:
    """Send one request to any GenerationService."""
    (completion,) = await complete_all(server, [request])
    return completion


async def interrupted(
    server: ServerProcess | str | Completer,
    request: CompletionRequest,
    strikes: Mapping[int, Callable[[], Awaitable[None] | None]],
) -> Completion:
    """Complete a request; call `strikes[n]` as soon as the answer has n tokens, before its end."""
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
    """Return a function that cuts a link, and restores it after `seconds`."""

    def strike() -> None:
        link.cut()
        asyncio.get_running_loop().call_later(seconds, link.restore)

    return strike


async def complete_all(
    server: ServerProcess | str, requests: Sequence[CompletionRequest], *, concurrency: int = 8
) -> list[Completion]:
    """Send requests over one channel, at most `concurrency` in flight; return the results in their order."""
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
    """Result of a run of `main.py`."""

    code: int
    stdout: str
    stderr: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects that --format json has printed, one per line."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def last_line(self) -> str:
        return self.stderr.strip().splitlines()[-1]


@asynccontextmanager
async def command(
    *arguments: str | Path, program: str = "main.py", cwd: Path = ROOT, variables: Mapping[str, str] = NO_VARIABLES
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Run `main.py`, another program of this project, or a module ("-m NAME"); kill it when the block ends.

    The process gets `variables` beside those of ENVIRONMENT.
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
    """Run `main.py`, or another program of this project, to its end."""
    async with command(*arguments, program=program, variables=variables) as process, asyncio.timeout(timeout_s):
        return await result_of(process)


async def result_of(process: asyncio.subprocess.Process) -> CommandResult:
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return CommandResult(process.returncode, stdout.decode(), stderr.decode())


async def until_attached(worker: PrivateWorker) -> None:
    """Wait until a client's own draft worker (private) has a stream to a target."""
    async with asyncio.timeout(60):
        while not any(stream.is_attached for stream, _ in worker._streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
