"""`vllm serve` with our configuration, and a pool beside it: the text is that of the server alone.

The tests run in this order: some of them end the pool, and the last ones vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import ROOT
from specdec.inference.serving.assembly import running
from specdec.inference.serving.processes import free_port
from tests.support.engine_contract import MODES, PROMPT, completed, onnx_engine, wanted
from tests.support.raw_worker import RawWorker, after, end_of, proposing, raw_worker
from tests.vllm.conftest import FLAGS, MAX_LENGTH, Pair

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

START_S = 300.0
NUM_TOKENS = 60
TOKEN = "0123456789abcdef0123456789abcdef"
LETTERS = list(range(66, 92))
"""Tokens of one letter each."""
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "minimum length": {"min_tokens": 12, "stop_token_ids": list(range(200)), "ignore_eos": False},
    "allowed tokens": {"allowed_token_ids": LETTERS},
    "words that may not be": {"bad_words": ["n", "k"]},
    "regular expression": {"structured_outputs": {"regex": "[a-z ]{12,30}"}, "ignore_eos": False},
    "two answers": {"n": 2},
    "stop string": {"stop": ["n"]},
    "log-probabilities": {"logprobs": 2},
}
"""Fields that are vLLM's own, beside speculation."""


def body_of(mode: str) -> dict[str, Any]:
    """Return the fields of vLLM's API for one of our modes; what vLLM refuses beside drafts goes by `vllm_xargs`."""
    fields = dict(MODES[mode])
    xargs = {name: fields.pop(name) for name in ("min_p",) if name in fields}
    if "logit_bias" in fields:
        xargs["logit_bias"] = json.dumps(dict(fields.pop("logit_bias")))
    fields["temperature"] = fields.get("temperature", 0.0)
    if "seed" in fields:
        fields["seed"] -= 2**64 * (fields["seed"] >= 2**63)  # vLLM's seeds are signed
    return fields | ({"vllm_xargs": xargs} if xargs else {})


@dataclass(slots=True)
class Site:
    """Server of vLLM, pool and draft workers."""

    folder: Path
    pair: Pair
    http_port: int = field(default_factory=free_port)
    pool_port: int = field(default_factory=free_port)
    vllm: asyncio.subprocess.Process | None = None
    pool: asyncio.subprocess.Process | None = None
    drafts: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def role(self, name: str, *flags: str, **options: Any) -> asyncio.subprocess.Process:
        command = (sys.executable, str(ROOT / "main.py"), "--role", name, *flags)
        return await asyncio.create_subprocess_exec(*command, **options)

    async def start_vllm(self) -> None:
        """Start vLLM's server as an operator does, and wait for its health."""
        config = self.folder / "specdec.yaml"
        if not config.exists():
            with config.open("wb") as file:
                mailbox = ("--mailbox", str(self.folder / "box"))
                assert await (await self.role("vllm-config", "--gamma", "8", *mailbox, stdout=file)).wait() == 0
        module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(self.pair.target))
        names = ("--served-model-name", "target", "--host", "127.0.0.1", "--port", str(self.http_port))
        arguments = (*module, *names, "--config", str(config), *FLAGS)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_USE_V2_MODEL_RUNNER": "0"}
        self.vllm = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=environment, start_new_session=True
        )
        async with asyncio.timeout(START_S):
            while not await self._is_healthy():
                assert self.vllm.returncode is None
                await asyncio.sleep(0.5)

    async def _is_healthy(self) -> bool:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            line = await reader.readline()
            writer.close()
            return b"200" in line
        return False

    async def end_vllm(self) -> None:
        if self.vllm is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.vllm.pid, signal.SIGKILL)
            await self.vllm.wait()

    async def start_pool(self) -> None:
        """Start the pool, and wait until it has found vLLM."""
        where = ("--port", str(self.pool_port), "--mailbox", str(self.folder / "box"), "--ready_json")
        security = ("--tls_self_signed", str(self.folder / "tls"), "--auth_file", str(self.folder / "auth.toml"))
        self.pool = await self.role("pool", *where, *security, stdout=asyncio.subprocess.PIPE)
        assert self.pool.stdout is not None
        async with asyncio.timeout(START_S):
            assert json.loads(await self.pool.stdout.readline())["ready"]

    async def start_draft(self) -> None:
        security = ("--tls_ca", str(self.folder / "tls" / "ca.pem"), "--token_file", str(self.folder / "token"))
        where = ("--model", str(self.pair.draft), "--attach", f"127.0.0.1:{self.pool_port}", "--threads", "1")
        self.drafts.append(await self.role("draft", *where, *security))

    async def ask(self, client: openai.AsyncOpenAI, fields: Mapping[str, Any], prompt: Any = PROMPT) -> list[Any]:
        """Return the tokens and texts of all answers to a request."""
        extra = {"return_token_ids": True, "ignore_eos": True, **fields}
        answer = await client.completions.create(
            model="target", prompt=list(prompt), max_tokens=NUM_TOKENS, extra_body=extra
        )
        return [(choice.token_ids, choice.text, choice.finish_reason) for choice in answer.choices]  # type: ignore[attr-defined]

    async def answers(self, disturb: Callable[[], Any] | None = None) -> dict[str, list[Any]]:
        """Return the answers to requests of all kinds, four at a time; disturb them after the first one."""
        wanted_ = {mode: body_of(mode) for mode in MODES}
        wanted_ |= {name: {"temperature": 0.8, "seed": 7, **fields} for name, fields in OWN_FIELDS.items()}
        room, got = asyncio.Semaphore(4), {}

        async def one(name: str, fields: dict[str, Any]) -> None:
            async with room:
                got[name] = await self.ask(self.client(), fields)
                if disturb is not None and len(got) == 1:
                    disturb()

        await asyncio.gather(*(one(*each) for each in wanted_.items()))
        return got

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.http_port}/v1", api_key="none", max_retries=0)

    async def num_accepted(self) -> float:
        """Return how many draft tokens vLLM itself says that it has accepted."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        name = "vllm:spec_decode_num_accepted_tokens_total{"
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def until_helped(self, right: Mapping[str, list[Any]]) -> None:
        """Ask until draft tokens are accepted; no answer may change."""
        before = await self.num_accepted()
        async with asyncio.timeout(120):
            while await self.num_accepted() == before:
                assert await self.answers() == right


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    site = Site(tmp_path_factory.mktemp("serve"), pair)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    (site.folder / "token").write_text(TOKEN)
    (site.folder / "token").chmod(0o600)
    roles = '["client", "worker"]'
    (site.folder / "auth.toml").write_text(f'[[token]]\nname = "tests"\nsha256 = "{digest}"\nroles = {roles}\n')
    try:
        await site.start_vllm()
        yield site
    finally:
        for process in (*site.drafts, site.pool):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        await site.end_vllm()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def right(site: Site) -> dict[str, list[Any]]:
    """Return the answers of vLLM's server without a pool."""
    return await site.answers()


async def test_a_server_alone_has_the_tokens_of_our_own_engine(site: Site, right: dict[str, list[Any]]) -> None:
    async with running(onnx_engine(site.pair.target, MAX_LENGTH)) as onnx:
        for mode in MODES:
            tokens, _ = await completed(onnx, wanted(mode, max_new_tokens=NUM_TOKENS))
            assert right[mode][0][0] == tokens, mode


async def test_fields_of_vllm_are_kept(right: dict[str, list[Any]]) -> None:
    assert set(right["allowed tokens"][0][0]) <= set(LETTERS)
    banned = {79, 76}  # tokens of these words
    assert banned <= set(right["noise"][0][0])
    assert not banned & set(right["words that may not be"][0][0])
    assert len(right["minimum length"][0][0]) > 12
    assert right["two answers"][0] != right["two answers"][1]
    assert right["two answers"][0][0] == right["noise"][0][0]
    assert right["stop string"][0][2] == "stop"


@pytest.mark.parametrize(
    ("xargs", "part"),
    [
        ({"gamma": 65}, "gamma 65"),
        ({"gamma": "no"}, "gamma 'no'"),
        ({"min_p": 2}, "min_p 2"),
        ({"logit_bias": "[1]"}, "logit_bias"),
        ({"logit_bias": '{"99999": 1}'}, "99999"),
    ],
)
async def test_wrong_fields_of_ours_are_refused_by_name(site: Site, xargs: dict[str, Any], part: str) -> None:
    with pytest.raises(openai.BadRequestError, match=part):
        await site.ask(site.client(), {"vllm_xargs": xargs})


async def test_a_request_without_a_seed_gets_one_of_its_own(site: Site) -> None:
    one, other = [await site.ask(site.client(), {"temperature": 1.0}) for _ in range(2)]
    assert one != other


async def test_a_pool_answers_no_client(site: Site) -> None:
    await site.start_pool()
    ca, token = (site.folder / "tls" / "ca.pem").read_bytes(), (("authorization", f"Bearer {TOKEN}"),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{site.pool_port}", grpc.ssl_channel_credentials(ca)) as channel:
        stub, request = rpc.GenerationServiceStub(channel), pb.GenerateRequest(text="a")
        code, told = await end_of(stub.Generate(request, metadata=token, timeout=30))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "vLLM" in told
        assert (await end_of(stub.Generate(request, timeout=30)))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_lying_worker_is_detached_and_changes_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    """The worker gets no salts of requests, and proposes a token id beyond the vocabulary."""
    ca, token = (site.folder / "tls" / "ca.pem").read_bytes(), ("authorization", f"Bearer {TOKEN}")
    async with raw_worker(f"127.0.0.1:{site.pool_port}", token, ca=ca, is_private=False) as worker:
        lying = asyncio.create_task(_lie(worker))
        while not lying.done():
            assert await site.ask(site.client(), {**body_of("noise"), "cache_salt": "a secret"}) == right["noise"]
        assert b"a secret" not in await lying
        assert (await end_of(worker.call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def _lie(worker: RawWorker) -> bytes:
    """Propose for each lent request until the stream ends; return the bytes of all messages that the pool sent."""
    sent = b""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await worker.call.read()) != grpc.aio.EOF:
            sent += message.SerializeToString()
            if message.WhichOneof("message") == "open":
                await worker.call.write(proposing(message.open.session_id, after(1, 2**31)))
    return sent


async def test_drafts_of_a_pool_help_and_change_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    await site.start_draft()
    await site.until_helped(right)


async def test_gamma_0_switches_drafts_off(site: Site, right: dict[str, list[Any]]) -> None:
    before = await site.num_accepted()
    fields = {"temperature": 0.8, "seed": 7, "vllm_xargs": {"gamma": 0}}
    answers = await asyncio.gather(*(site.ask(site.client(), fields) for _ in range(4)))
    assert answers == [right["noise"]] * 4
    assert await site.num_accepted() == before


async def test_a_pool_that_is_killed_changes_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    assert site.pool is not None
    assert await site.answers(disturb=site.pool.kill) == right
    await site.pool.wait()
    assert await site.answers() == right


@pytest.mark.release
async def test_the_next_pool_has_the_workers_of_the_last(site: Site, right: dict[str, list[Any]]) -> None:
    await site.start_pool()
    await site.until_helped(right)


@pytest.mark.release
async def test_two_workers_change_nothing(site: Site, right: dict[str, list[Any]]) -> None:
    await site.start_draft()
    await site.start_draft()
    await site.until_helped(right)
    assert await site.answers(disturb=site.drafts[-1].kill) == right


@pytest.mark.release
async def test_a_stopped_pool_holds_no_request_up(site: Site, right: dict[str, list[Any]]) -> None:
    assert site.pool is not None
    site.pool.send_signal(signal.SIGSTOP)
    try:
        assert await site.answers() == right
    finally:
        site.pool.send_signal(signal.SIGCONT)
    await site.until_helped(right)


@pytest.mark.release
async def test_vllm_is_restarted_under_the_pool(site: Site, right: dict[str, list[Any]]) -> None:
    await site.end_vllm()
    await site.start_vllm()
    await site.until_helped(right)
