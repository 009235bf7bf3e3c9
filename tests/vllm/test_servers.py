"""Tests of targets on the real vLLM, with TLS and access tokens: if a process is killed during streams, answers stay.

The tests run in this order, since most of them end a server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.commit import Delta
from specdec.inference.config import ROOT, ConnectionConfig, DialSecurity
from specdec.inference.errors import IncompatibleDraftError, UnauthenticatedError
from specdec.inference.request import SamplingParams
from specdec.inference.serving.assembly import running
from specdec.inference.serving.processes import free_port
from specdec.inference.vllm.group import members
from specdec.inference.vllm.hooks import VARIABLE
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.resuming import Progress
from specdec.inference.workers.completion import CompletionRequest
from tests.support.engine_contract import PROMPT, completed, onnx_engine, wanted
from tests.support.models import save_tiny_model
from tests.support.raw_worker import RawWorker, after, below, end_of, proposing, raw_worker
from tests.support.servers import until_pooled
from tests.vllm.conftest import FLAGS, INTERPRETED, LAW, MAX_LENGTH, WORKER_PROCESS, Pair

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

TOKEN = "0123456789abcdef0123456789abcdef"
NUM_TOKENS = 50
START_S = 300.0
PATIENCE_S = 120.0
"""Seconds within which a server that is alive answers, even on a busy machine."""
GONE_S = 60.0
"""Most seconds that a server's processes may take to end; on a quiet machine they take less than ten."""


@dataclass(slots=True)
class Server:
    """A target's process and its ports.

    `front` is the id of the server's own process, and of the process group that it leads.
    """

    process: asyncio.subprocess.Process
    port: int
    http_port: int
    front: int

    async def until_gone(self) -> None:
        """Wait until no process of the server's group is left; fail after GONE_S seconds."""
        await asyncio.wait_for(self.process.wait(), GONE_S)
        await asyncio.to_thread(_until_empty, self.front)

    def core(self) -> int:
        """Return the process id of the server's vLLM engine core."""
        return next(each for each in members(self.front) if b"EngineCore" in command_of(each))

    def worker(self) -> int:
        """Return the process id of the server's vLLM worker."""
        return next(each for each in members(self.front) if b"Worker" in command_of(each))


def command_of(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def _until_empty(group: int) -> None:
    end = time.monotonic() + GONE_S
    while members(group):
        assert time.monotonic() < end, members(group)
        time.sleep(0.05)


@dataclass(slots=True)
class Site:
    """Targets, the folder of their certificates and auth file, and the answers that each of them must give.

    Attributes:
        prompts: prompts as token ids; the seed of a request is the prompt's index.
        answers: token ids of the right answers, in the order of the prompts.
        draft: directory of the draft model.
    """

    servers: list[Server]
    folder: Path
    prompts: Sequence[tuple[int, ...]]
    answers: list[list[int]]
    draft: Path

    @asynccontextmanager
    async def explained(self) -> AsyncGenerator[None, None]:
        """Add ports, exit codes and processes of all servers to the message of any error that the block raises."""
        try:
            yield
        except Exception as exc:
            states = [(each.port, each.process.returncode, members(each.front)) for each in self.servers]
            exc.add_note(f"ports of the servers, their exit codes and processes: {states}")
            raise

    def link(self, *servers: Server) -> ConnectionConfig:
        security = DialSecurity(ca=self.folder / "tls" / "ca.pem", token_file=self.folder / "token")
        where = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        return ConnectionConfig(
            where, 1, connect_timeout_s=PATIENCE_S, reconnect_timeout_s=PATIENCE_S, security=security
        )

    async def start(
        self, model: Path, *, has_worker: bool = False, environment: Mapping[str, str] | None = None
    ) -> Server:
        """Start a target over vLLM, and wait until it is ready.

        Args:
            has_worker: True runs vLLM's worker as a process of its own, False in the engine core.
            environment: environment variables of the target, beside those of this process.
        """
        port = free_port()
        security = ("--tls_self_signed", str(self.folder / "tls"), "--auth_file", str(self.folder / "auth.toml"))
        ports = ("--port", str(port), "--http_port", "0")
        counted = ("--no-lookup", "--drafting", "always")  # so that a worker's tokens are
        ours = (*ports, "--ready_json", *counted, *security)
        arguments = ("--engine", "vllm", "--model", str(model), *ours)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "main.py"),
            "--role",
            "target",
            *arguments,
            "--",
            *FLAGS,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, WORKER_PROCESS: str(int(has_worker)), **(environment or {})},
        )
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            ready = json.loads(await process.stdout.readline())
        return Server(process, port, ready["ports"]["http"], ready["pid"])

    async def start_draft(self, *servers: Server) -> asyncio.subprocess.Process:
        """Start a draft worker, and wait until it has attached to all of these servers."""
        where = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        security = ("--tls_ca", str(self.folder / "tls" / "ca.pem"), "--token_file", str(self.folder / "token"))
        flags = (
            "--model",
            str(self.draft),
            "--attach",
            where,
            "--threads",
            "1",
            "--connect_timeout_s",
            "60",
            *security,
        )
        command = (sys.executable, str(ROOT / "main.py"), "--role", "draft", *flags)
        draft = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        await until_pooled(draft, len(servers))
        return draft

    def attached(self, server: Server) -> AbstractAsyncContextManager[RawWorker]:
        """Attach to a server's draft pool a worker whose messages the test writes itself."""
        ca, token = (self.folder / "tls" / "ca.pem").read_bytes(), ("authorization", f"Bearer {TOKEN}")
        return raw_worker(f"127.0.0.1:{server.port}", token, ca=ca, is_private=False)

    async def asked(self, *servers: Server, disturb: Callable[[], Any] | None = None) -> tuple[list[list[int]], int]:
        """Send all `prompts` to the servers; return the answers' token ids, and the number of accepted draft tokens.

        Call `disturb` once every answer has begun. Regression: a busy machine had not sent all requests when their
        server was stopped, and the server rightly refused the rest.
        """
        link, begun = self.link(*servers), [asyncio.Event() for _ in self.prompts]
        async with self.explained(), connected(link) as fleet:
            completer = FailoverCompleter(fleet, link)

            async def one(prompt: tuple[int, ...], seed: int) -> tuple[list[int], int]:
                penalty = 0.5 * (seed % 2)
                sampling = SamplingParams(temperature=0.8, presence_penalty=penalty)
                request = CompletionRequest(prompt, sampling, seed=seed, max_new_tokens=NUM_TOKENS, ignore_eos=True)
                tokens: list[int] = []
                num_accepted = 0
                async with aclosing(completer.complete(request)) as events:
                    async for event in events:
                        if isinstance(event, Delta):
                            tokens += event.token_ids
                            num_accepted += event.num_accepted_tokens
                            begun[seed].set()
                return tokens, num_accepted

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt, seed)) for seed, prompt in enumerate(self.prompts)]
                if disturb is not None:
                    await asyncio.gather(*(each.wait() for each in begun))
                    disturb()
        results = [task.result() for task in tasks]
        return [tokens for tokens, _ in results], sum(number for _, number in results)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    folder = tmp_path_factory.mktemp("site")
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    roles = '["client", "worker", "ops"]'
    (folder / "auth.toml").write_text(f'[[token]]\nname = "tests"\nsha256 = "{digest}"\nroles = {roles}\n')
    prompts = [PROMPT[number : number + 20] for number in range(6)]
    answers = []
    async with running(onnx_engine(pair.target, MAX_LENGTH, LAW)) as onnx:
        for seed, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.8, presence_penalty=0.5 * (seed % 2), seed=seed)
            request = wanted(prompt=prompt, max_new_tokens=NUM_TOKENS)
            answers.append((await completed(onnx, replace(request, sampling=sampling)))[0])
    site = Site([], folder, prompts, answers, pair.draft)
    site.servers += await asyncio.gather(*(site.start(pair.target) for _ in range(2)))
    yield site
    for server in site.servers:
        if server.process.returncode is None:
            server.process.terminate()
            await server.process.wait()
    for server in site.servers:
        await server.until_gone()


async def test_a_draft_worker_helps_and_changes_nothing(site: Site) -> None:
    assert (await site.asked(*site.servers)) == (site.answers, 0)
    draft = await site.start_draft(*site.servers)
    try:
        async with asyncio.timeout(START_S):
            while True:
                answers, num_accepted = await site.asked(*site.servers)
                assert answers == site.answers
                if num_accepted:
                    break
        assert (await site.asked(*site.servers, disturb=draft.kill))[0] == site.answers
    finally:
        if draft.returncode is None:
            draft.kill()
        await draft.wait()
    assert (await site.asked(*site.servers))[0] == site.answers


async def test_http_has_the_same_tokens(site: Site) -> None:
    """A target over vLLM serves HTTP from its own process, with the version of FastAPI that vLLM brings.

    Regression: HTTP needed a newer FastAPI, and so a gateway in another environment.
    """
    authority = ssl.create_default_context(cafile=site.folder / "tls" / "ca.pem")
    async with httpx.AsyncClient(verify=authority, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
        for seed, (prompt, answer) in enumerate(zip(site.prompts, site.answers, strict=True)):
            asked = {"prompt": prompt, "seed": seed, "temperature": 0.8, "presence_penalty": 0.5 * (seed % 2)}
            shape = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
            shown = {"stream_options": {"include_speculation": True}}
            url = f"https://127.0.0.1:{site.servers[0].http_port}/v1/completions"
            async with client.stream("POST", url, json=asked | shape | shown) as events:
                lines = [line async for line in events.aiter_lines()]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert [each for chunk in chunks for each in chunk["speculation"]["token_ids"]] == answer, lines


@pytest.mark.parametrize(
    "branches",
    [
        [after(1, 5), below(99, 5)],  # a node that was never proposed
        [after(10_000, 5)],  # a prefix that was never committed
        [after(1, 2**31)],  # no token of the model
        [after(1, *[5] * 300)],  # more than a tree may have
    ],
    ids=["unknown node", "unknown prefix", "unknown token", "too long"],
)
async def test_a_hostile_worker_is_detached_and_changes_nothing(site: Site, branches: list[pb.Branch]) -> None:
    server = site.servers[0]
    async with site.attached(server) as worker:
        refusal = asyncio.create_task(_propose_until_refused(worker.call, branches))
        while not refusal.done():
            assert (await site.asked(server))[0] == site.answers
        refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL}  # the library's, of a write at the end
        assert (await end_of(worker.call))[0] in refused


async def _propose_until_refused(call: Any, branches: list[pb.Branch]) -> None:
    """Propose wrong tokens for one request after another, until the target ends the stream with an error.

    After a proposal, wait until the target closes that session: a write to an ended stream would change its status.
    """
    sessions: list[str] = []
    proposed = ""
    with suppress(grpc.aio.AioRpcError):
        while (message := await call.read()) != grpc.aio.EOF:
            if message.WhichOneof("message") == "open":
                sessions.append(message.open.session_id)
            elif message.WhichOneof("message") == "close":
                sessions.remove(message.close.session_id)
            if sessions and proposed not in sessions:
                proposed = sessions[0]
                await call.write(proposing(proposed, *branches))


async def test_a_flood_of_draft_tokens_changes_nothing(site: Site) -> None:
    """A draft worker of the pool that floods the target with wrong draft tokens changes no answer.

    It proposes 256 of them for every request, again and again, and waits for no result.
    """
    server = site.servers[0]
    async with site.attached(server) as worker:
        asking = asyncio.create_task(site.asked(server))
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(6):
                while (opened := await worker.call.read()).WhichOneof("message") != "open":
                    pass
                for _ in range(50):
                    await worker.call.write(proposing(opened.open.session_id, after(1, *range(2, 258))))
        assert (await asking)[0] == site.answers


async def test_without_a_token_nothing_is_served(site: Site) -> None:
    link = replace(site.link(site.servers[0]), security=replace(site.link(site.servers[0]).security, token_file=None))
    async with connected(link) as fleet:
        with pytest.raises(UnauthenticatedError):
            async for _ in FailoverCompleter(fleet, link).complete(CompletionRequest(PROMPT)):
                pass


async def test_a_lost_core_ends_its_server_and_streams_resume_elsewhere(site: Site) -> None:
    lost = site.servers[1]
    core = lost.core()
    answers, _ = await site.asked(*site.servers, disturb=lambda: os.kill(core, signal.SIGKILL))
    assert answers == site.answers
    assert await asyncio.wait_for(lost.process.wait(), GONE_S) == 1
    await lost.until_gone()


async def test_ctrl_c_lets_requests_finish_and_leaves_nothing(site: Site) -> None:
    """After Ctrl-C the running requests finish, and then no process is left.

    Regression: Ctrl-C reached vLLM's core too, which ended before the running requests had finished.
    """
    server = site.servers[0]
    answers, _ = await site.asked(server, disturb=lambda: server.process.send_signal(signal.SIGINT))
    assert answers == site.answers
    assert await asyncio.wait_for(server.process.wait(), GONE_S) == 0
    await server.until_gone()
    assert server.process.stdout is not None
    assert await server.process.stdout.read() == b""  # the line of readiness was all


@pytest.mark.release
async def test_a_lost_worker_ends_its_server_and_a_lost_front_its_core_while_busy(site: Site, pair: Pair) -> None:
    starts = [site.start(pair.target, has_worker=True) for _ in range(3)]
    site.servers += (servers := await asyncio.gather(*starts))
    lost, other, _ = servers
    worker = lost.worker()
    answers, _ = await site.asked(*servers, disturb=lambda: os.kill(worker, signal.SIGKILL))
    assert answers == site.answers
    assert await asyncio.wait_for(lost.process.wait(), GONE_S) == 1
    await lost.until_gone()
    answers, _ = await site.asked(*servers[1:], disturb=lambda: os.kill(other.front, signal.SIGKILL))
    assert answers == site.answers
    await other.until_gone()


async def begun_at(
    site: Site, server: Server, request: CompletionRequest, num_tokens: int
) -> tuple[list[int], Progress]:
    """Ask a server until there are `num_tokens` or more; return the tokens, and the state for resuming the answer."""
    link, progress, tokens = site.link(server), Progress(request), list[int]()
    async with connected(link) as fleet, aclosing(FailoverCompleter(fleet, link).complete(request)) as events:
        async for event in events:
            progress.take(event)
            tokens += event.token_ids if isinstance(event, Delta) else ()
            if len(tokens) >= num_tokens:
                break
    return tokens, progress


@pytest.mark.release
async def test_no_stream_moves_between_the_laws_of_two_runners(site: Site, pair: Pair) -> None:
    """A stream is continued only by a server that draws tokens by the same rule; others refuse it, and say what to do.

    vLLM's model runner V1 draws by this project's rule from seed and position, runner V2 by that of `vllm_same_text`.
    """
    laws: tuple[Mapping[str, str], ...] = {VARIABLE: "0", "TRITON_INTERPRET": "0"}, INTERPRETED
    site.servers += (servers := await asyncio.gather(*(site.start(pair.target, environment=law) for law in laws)))
    sampling = SamplingParams(temperature=0.8)
    request = CompletionRequest(site.prompts[0], sampling, seed=3, max_new_tokens=30, ignore_eos=True)
    for here, there in (servers, servers[::-1]):
        tokens, _ = await begun_at(site, here, request, 30)
        begun, progress = await begun_at(site, here, request, 10)
        assert begun == tokens[: len(begun)]
        with pytest.raises(
            IncompatibleDraftError, match="it cannot resume, take a server where it is the same, or ask anew"
        ):
            await begun_at(site, there, progress.rest(), 1)
        rest, _ = await begun_at(site, here, progress.rest(), 30 - len(begun))
        assert begun + rest == tokens


async def refused(*arguments: str | Path) -> str:
    """Start a target with wrong flags, which must end with code 2; return its only line of errors."""
    program = (sys.executable, str(ROOT / "main.py"), "--role", "target", "--engine", "vllm")
    process = await asyncio.create_subprocess_exec(*program, *map(str, arguments), stderr=asyncio.subprocess.PIPE)
    _, told = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    (line,) = (line for line in told.decode().splitlines() if line.startswith("error: "))
    return line


async def test_a_wrong_model_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "no such directory" in await refused("--model", tmp_path / "none")


@pytest.mark.release
async def test_what_vllm_refuses_is_one_line(pair: Pair) -> None:
    assert "max_model_len (9999)" in await refused("--model", pair.target, "--", "--max-model-len", "9999")


@pytest.mark.release
async def test_a_model_that_cannot_run_is_never_ready(tmp_path: Path) -> None:
    """A server whose model vLLM cannot run ends with an error instead of becoming ready.

    Regression: vLLM makes no pass at its start, so the first request of a client was the first to fail.
    """
    model = save_tiny_model(tmp_path / "model", "llama", seed=1)  # its heads have 8 values: none of vLLM's sizes
    assert "cannot run this model" in await refused("--model", model, "--port", "0", "--", *FLAGS)
