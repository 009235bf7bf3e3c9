"""For tests: `vllm serve` with this project's configuration file, and beside it a pool that draft workers attach to."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port
from specdec.inference.vllm.hooks import VARIABLE
from tests.support.engine_contract import MODES, PROMPT
from tests.support.raw_worker import RawWorker, raw_worker
from tests.support.servers import until_pooled
from tests.vllm.conftest import FLAGS, Pair

START_S = 900.0
NUM_TOKENS = 60
TOKEN = "0123456789abcdef0123456789abcdef"
LETTERS = list(range(66, 92))
"""Ids of 26 tokens that are one letter each."""
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "minimum length": {"min_tokens": 12, "stop_token_ids": list(range(100)), "ignore_eos": False},
    "allowed tokens": {"allowed_token_ids": LETTERS},
    "words that may not be": {"bad_words": ["n", "k"]},
    "regular expression": {"structured_outputs": {"regex": "[a-z ]{12,30}"}, "ignore_eos": False},
    "two answers": {"n": 2},
    "stop string": {"stop": ["n"]},
    "log-probabilities": {"logprobs": 2},
}
"""Request fields for features of vLLM, by feature; with speculation they must work as without."""


def body_of(mode: str) -> dict[str, Any]:
    """Return the request fields of one of `MODES`, as a client of stock vLLM sends them.

    With its own speculation, vLLM would refuse some of these fields.
    """
    fields = dict(MODES[mode])
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in fields["logit_bias"]}
    fields["temperature"] = fields.get("temperature", 0.0)
    if "seed" in fields:
        fields["seed"] -= 2**64 * (fields["seed"] >= 2**63)  # vLLM's seeds are signed
    return fields


@dataclass(slots=True)
class Site:
    """A vLLM server, the draft pool beside it (a process), and the draft workers of the pool.

    Attributes:
        folder: folder of the configuration and of keys; all servers with the same folder have one pool.
        config: flags of `specdec vllm-config`; None for vLLM without this project's configuration file.
    """

    folder: Path
    pair: Pair
    config: tuple[str, ...] | None = ("--gamma", "8")
    http_port: int = field(default_factory=free_port)
    pool_port: int = field(default_factory=free_port)
    vllm: asyncio.subprocess.Process | None = None
    pool: asyncio.subprocess.Process | None = None
    drafts: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def role(self, name: str, *flags: str, **options: Any) -> asyncio.subprocess.Process:
        command = (sys.executable, str(ROOT / "main.py"), "--role", name, *flags)
        return await asyncio.create_subprocess_exec(*command, **options)

    async def start_vllm(self, *flags: str) -> None:
        """Start vLLM's server by its command line, and wait until it is healthy."""
        module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(self.pair.target))
        names = ("--served-model-name", "target", "--host", "127.0.0.1", "--port", str(self.http_port))
        arguments = (*module, *names, *FLAGS, *flags, *await self._file())
        plugin = _registered(self.folder / "plugin")
        paths = os.pathsep.join(filter(None, (str(ROOT), str(plugin), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, VARIABLE: os.environ.get(VARIABLE, "0")}
        self.vllm = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=environment, start_new_session=True
        )
        async with asyncio.timeout(START_S):
            while not await self._is_healthy():
                assert self.vllm.returncode is None
                await asyncio.sleep(0.5)

    async def _file(self) -> tuple[str, ...]:
        """Write this project's configuration file for vLLM; return vLLM's flag for it, or () if `config` is None."""
        if self.config is None:
            return ()
        file = self.folder / f"specdec-{self.http_port}.yaml"
        mailbox = ("--mailbox", str(self.folder / "box"))
        with file.open("wb") as output:
            assert await (await self.role("vllm-config", *self.config, *mailbox, stdout=output)).wait() == 0
        return "--config", str(file)

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
        """Start the pool, which hands draft workers' tokens to vLLM, and wait until it has found vLLM."""
        where = ("--port", str(self.pool_port), "--mailbox", str(self.folder / "box"), "--ready_json")
        drafting = ("--drafting", "always")
        security = ("--tls_self_signed", str(self.folder / "tls"), "--auth_file", str(self.folder / "auth.toml"))
        self.pool = await self.role("pool", *where, *drafting, *security, stdout=asyncio.subprocess.PIPE)
        assert self.pool.stdout is not None
        async with asyncio.timeout(START_S):
            assert json.loads(await self.pool.stdout.readline())["ready"]

    async def start_draft(self) -> None:
        """Start a draft worker, and wait until it has attached, since requests would slow its start down."""
        security = ("--tls_ca", str(self.folder / "tls" / "ca.pem"), "--token_file", str(self.folder / "token"))
        where = ("--model", str(self.pair.draft), "--attach", f"127.0.0.1:{self.pool_port}", "--threads", "1")
        self.drafts.append(await self.role("draft", *where, *security, stderr=asyncio.subprocess.PIPE))
        await until_pooled(self.drafts[-1])

    def raw_worker(self) -> AbstractAsyncContextManager[RawWorker]:
        """Attach a draft worker to the pool; the test itself writes its messages, until the block ends."""
        ca, token = (self.folder / "tls" / "ca.pem").read_bytes(), ("authorization", f"Bearer {TOKEN}")
        return raw_worker(f"127.0.0.1:{self.pool_port}", token, ca=ca, is_private=False)

    async def ask(self, fields: Mapping[str, Any], model: str = "target") -> list[Any]:
        """Send a request with these fields; return (token ids, text, finish reason) of each choice."""
        answer = await self._create(fields, model)
        return [(choice.token_ids, choice.text, choice.finish_reason) for choice in answer.choices]

    async def stream(self, fields: Mapping[str, Any]) -> AsyncGenerator[list[int], None]:
        """Send a streamed request with these fields; yield the token ids in each event of the answer."""
        async for event in await self._create(fields, "target", stream=True):
            yield event.choices[0].token_ids or []

    async def _create(self, fields: Mapping[str, Any], model: str, *, stream: bool = False) -> Any:
        extra = {"return_token_ids": True, "ignore_eos": True, **fields}
        asked: dict[str, Any] = {"model": model, "prompt": list(PROMPT), "max_tokens": NUM_TOKENS, "stream": stream}
        return await self.client().completions.create(**asked, extra_body=extra)

    async def answers(self, disturb: Callable[[], Any] | None = None) -> dict[str, list[Any]]:
        """Send requests of all modes and features, four at a time; return their answers by mode or feature.

        `disturb` is called after the first answer.
        """
        wanted_ = {mode: body_of(mode) for mode in MODES}
        wanted_ |= {name: {"temperature": 0.8, "seed": 7, **fields} for name, fields in OWN_FIELDS.items()}
        room, got = asyncio.Semaphore(4), {}

        async def one(name: str, fields: dict[str, Any]) -> None:
            async with room:
                got[name] = await self.ask(fields)
                if disturb is not None and len(got) == 1:
                    disturb()

        await asyncio.gather(*(one(*each) for each in wanted_.items()))
        return got

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.http_port}/v1", api_key="none", max_retries=0)

    async def num_accepted(self) -> float:
        """Return the number of accepted draft tokens in all engine cores, from vLLM's metrics."""
        return sum(await self.accepted())

    async def accepted(self) -> list[float]:
        """Return the number of accepted draft tokens of each engine core, from vLLM's metrics."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        name = "vllm:spec_decode_num_accepted_tokens_total{"
        return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]

    async def until_helped(self, right: Mapping[str, list[Any]]) -> None:
        """Repeat the requests until a draft token is accepted; fail if answers differ from `right`."""
        before = await self.num_accepted()
        async with asyncio.timeout(START_S):
            while await self.num_accepted() == before:
                assert await self.answers() == right


def _registered(folder: Path) -> Path:
    """Write the metadata of an installed `vllm_same_text`, by which vLLM finds the plug-in; return the folder."""
    info = folder / "vllm_same_text-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-same-text\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsame_text = vllm_same_text:register\n")
    return folder


@asynccontextmanager
async def sites(*all_: Site) -> AsyncGenerator[None, None]:
    """Write the access token and auth file of these servers, which the block may start; end them when it ends.

    All must have the same folder.
    """
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    folder = all_[0].folder
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    roles = '["client", "worker"]'
    (folder / "auth.toml").write_text(f'[[token]]\nname = "tests"\nsha256 = "{digest}"\nroles = {roles}\n')
    try:
        yield
    finally:
        for site in all_:
            for process in (*site.drafts, site.pool):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
            await site.end_vllm()
