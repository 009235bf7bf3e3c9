"""Servers, command lines and requests of the integration tests: real processes, real sockets.

Owns how a test starts `main.py` and how it asks a GenerationService. Models are tiny (models.py), one thread each.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from specdec.grpc_comm.channel import open_channel
from specdec.inference.commit import Delta, Finished, FinishReason, Started
from specdec.inference.config import ROOT
from specdec.inference.serving.processes import ServerProcess, free_port, server_process
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import CompletionRequest, ModelCard
from specdec.inference.workers.drafting.private import PrivateWorker

PATIENT = ("--connect_timeout_s", "60")
"""Flags of a command that dials: on a busy machine, a first handshake may take more than the default."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def target_server(model: Path, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    port = free_port()
    arguments = ("--model", str(model), "--port", str(port), "--threads", "1", *flags)
    return server_process("target", "target", *arguments, port=port)


def draft_server(model: Path | str, target: ServerProcess, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    """Start a `draft --serve` that verifies at `target`."""
    port = free_port()
    arguments = (
        "--model",
        str(model),
        "--port",
        str(target.port),
        "--serve",
        str(port),
        "--threads",
        "1",
        *PATIENT,
        *flags,
    )
    return server_process("draft", "draft", *arguments, port=port)


def fused_server(target: Path, draft: Path, *flags: str) -> AbstractAsyncContextManager[ServerProcess]:
    """Start a pair with a fixed length, unless flags change it: a draft as large as its target never pays."""
    port = free_port()
    fixed = ("--no-adaptive_gamma", "--gamma", "4")
    models = ("--target_model", str(target), "--draft_model", str(draft))
    return server_process(
        "fused", "fused_target", *models, "--port", str(port), "--threads", "1", *fixed, *flags, port=port
    )


async def until_healthy(port: int) -> None:
    """Wait for a server's HTTP."""
    async with httpx.AsyncClient() as client, asyncio.timeout(120):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/health")).is_success:
                    return
            await asyncio.sleep(0.1)


async def vocabulary_share(metrics_port: int) -> float:
    """Return the share of the target's ids that a server's draft can propose, as its metrics have it."""
    async with httpx.AsyncClient() as client:
        figures = (await client.get(f"http://127.0.0.1:{metrics_port}/metrics")).text
    found = re.search(r"^specdec_draft_vocabulary_share{.*} (.*)$", figures, re.MULTILINE)
    assert found is not None
    return float(found[1])


@dataclass
class Completion:
    """The outcome of one request; draft tokens without those that the target looked up."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_lookup_tokens: int = 0
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
            self.num_deltas += 1
            self.rejected.append((event.num_draft_tokens - event.num_accepted_tokens, event.rejected_text))


async def complete(server: ServerProcess | str, request: CompletionRequest) -> Completion:
    """Send one request to any GenerationService."""
    (completion,) = await complete_all(server, [request])
    return completion


async def complete_all(
    server: ServerProcess | str, requests: Sequence[CompletionRequest], *, concurrency: int = 8
) -> list[Completion]:
    """Send requests over one channel, at most `concurrency` in flight; return the results in their order."""
    address = server if isinstance(server, str) else server.address
    places = asyncio.Semaphore(concurrency)
    async with open_channel(address) as channel:
        completer = RemoteCompleter(channel, address, deadline_s=60.0)

        async def one(request: CompletionRequest) -> Completion:
            completion = Completion()
            async with places:
                async for event in completer.complete(request):
                    completion.record(event)
            return completion

        return list(await asyncio.gather(*(one(request) for request in requests)))


def with_gamma(requests: Sequence[CompletionRequest], gamma: int) -> list[CompletionRequest]:
    return [replace(request, gamma=gamma) for request in requests]


@dataclass(frozen=True)
class CommandResult:
    """The end of a run of `main.py`."""

    code: int
    stdout: str
    stderr: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Objects that --format json prints, one a line."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def last_line(self) -> str:
        return self.stderr.strip().splitlines()[-1]


@asynccontextmanager
async def command(*arguments: str | Path, program: str = "main.py") -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Run `main.py`, or another program of ours; kill it at the latest when the block is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / program),
        *map(str, arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run_command(*arguments: str | Path, program: str = "main.py", timeout_s: float = 150.0) -> CommandResult:
    """Run `main.py`, or another program of ours, to its end."""
    async with command(*arguments, program=program) as process, asyncio.timeout(timeout_s):
        return await result_of(process)


async def result_of(process: asyncio.subprocess.Process) -> CommandResult:
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return CommandResult(process.returncode, stdout.decode(), stderr.decode())


async def until_attached(worker: PrivateWorker) -> None:
    """Wait until a private worker has a stream to a target."""
    async with asyncio.timeout(60):
        while not any(stream.is_attached for stream, _ in worker._streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def card_of(words: Vocabulary) -> ModelCard:
    """Return the card of a target that has this vocabulary."""
    return ModelCard("target", "target", 128, words.size, words.fingerprint, model_id="m")
