"""A serving draft worker with prompt lookup, at scripted targets that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.grpc_comm import server as grpc_server
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import (
    ConnectionConfig,
    DraftConfig,
    HttpConfig,
    ObserveConfig,
    ProposerConfig,
    ServerConfig,
)
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import TargetEngine
from specdec.inference.errors import DeadlineError, IncompatibleDraftError, SpecDecError, UnauthenticatedError
from specdec.inference.serving.draft import serve_draft
from specdec.inference.serving.processes import free_port
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls import fleet
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completion import ModelCard
from specdec.inference.workers.drafting.service import VerificationServicer
from tests.support.models import save_tiny_model
from tests.support.ports import listening
from tests.support.scripted import VOCAB_SIZE, ScriptedDecoder, tokens_at

PROBE_PORT = free_port()
NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CLOSE_GRACE_S", 0.05)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE)


@pytest.fixture
def card(directory: Path) -> ModelCard:
    return ModelCard("first", "target", 1000, VOCAB_SIZE, Tokenizer.load(directory).fingerprint, model_id="m1")


class Refusing(GenerationServicer):
    """Servicer whose GetModel raises one of `errors` per call, then works."""

    def __init__(self, *args: Any, errors: list[SpecDecError]) -> None:
        super().__init__(*args)
        self._errors = errors

    async def GetModel(self, request: Any, context: Any) -> Any:
        if self._errors:
            raise self._errors.pop()
        return await super().GetModel(request, context)


@asynccontextmanager
async def target(directory: Path, card: ModelCard, port: int, *errors: SpecDecError) -> AsyncGenerator[None, None]:
    engine = TargetEngine(ScriptedDecoder(num_slots=2))
    engine.start()
    pool = DraftPool(engine)
    completer = LocalCompleter(pool, Tokenizer.load(directory), model_id=card.model_id)
    verification = VerificationServicer(pool, Vocabulary(card.tokenizer_fingerprint, card.vocab_size))
    generation = Refusing(completer, card, errors=list(errors))
    async with listening(verification, generation, address=f"127.0.0.1:{port}"):
        try:
            yield
        finally:
            await engine.stop()


@asynccontextmanager
async def serving(directory: Path, target_port: int) -> AsyncGenerator[tuple[grpc.aio.Channel, int], None]:
    """Serve a draft with this directory's tokenizer; yield a channel to it, and its HTTP port."""
    server, web = ServerConfig(port=free_port(), grace_s=0.0, probe_port=PROBE_PORT), HttpConfig(free_port())
    draft = DraftConfig(ConnectionConfig("127.0.0.1", target_port, reconnect_timeout_s=0.1))
    proposer = ProposerConfig(directory, None, num_slots=2)
    task = asyncio.create_task(serve_draft(proposer, draft, server, web, ObserveConfig("draft")))
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        ready = asyncio.create_task(channel.channel_ready())
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        try:
            if task.done():
                task.result()
            yield channel, web.port
        finally:
            for each in (task, ready):
                each.cancel()
            await asyncio.gather(task, ready, return_exceptions=True)


async def until(channel: grpc.aio.Channel, status: int) -> None:
    """Wait until the draft's health has this status."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == status:
                return


async def shown(channel: grpc.aio.Channel) -> tuple[str, str, str | None]:
    message = await rpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest())
    return message.name, message.model_id, message.chat_template


async def generated(channel: grpc.aio.Channel) -> list[int]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), max_new_tokens=20, ignore_eos=True)
    call = rpc.GenerationServiceStub(channel).Generate(request, timeout=60)
    return [token_id async for message in call for token_id in message.delta.token_ids]


async def test_clients_learn_of_another_model_at_the_target(directory: Path, card: ModelCard) -> None:
    """When the model at its target changes, a draft worker tells its clients the new name and template.

    Regression: the worker read name and template once, and served another model's text under the old name.
    """
    port = free_port()
    async with target(directory, card, port):
        serves = serving(directory, port)
        channel, web_port = await serves.__aenter__()
        await until(channel, SERVING)
        assert await shown(channel) == ("first", "m1", "")
        assert await generated(channel) == tokens_at(3, 20)
    await until(channel, NOT_SERVING)
    template = "{{ messages[0]['content'] }}"
    second = replace(card, name="second", model_id="m2", chat_template=template, vocab_size=VOCAB_SIZE + 64)
    async with target(directory, second, port):
        await until(channel, SERVING)
        assert await shown(channel) == ("second", "m2", template)
        model = await rpc.GenerationServiceStub(channel).GetModel(pb.GetModelRequest())
        assert model.vocab_size == VOCAB_SIZE + 64  # one tokenizer, padded otherwise
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{web_port}") as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "second"
            assert (await client.get("/readyz")).status_code == 200
        assert await generated(channel) == tokens_at(3, 20)
    await serves.__aexit__(None, None, None)


@pytest.mark.parametrize("kind", [DeadlineError, UnauthenticatedError])
async def test_a_target_without_model_card_is_asked_again(
    directory: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch, kind: type[SpecDecError]
) -> None:
    """A draft worker asks once more when its target has not described its model.

    Regression: a draft worker asked a replaced target once; if it was busy, the old name and template
    stayed.
    """
    monkeypatch.setattr(fleet, "LOOK_AGAIN_S", 0.05)
    port = free_port()
    async with target(directory, card, port):
        serves = serving(directory, port)
        channel, _ = await serves.__aenter__()
        await until(channel, SERVING)
    await until(channel, NOT_SERVING)
    async with target(directory, replace(card, name="second", model_id="m2"), port, kind("not now"), kind("not now")):
        async with asyncio.timeout(60):
            while (await shown(channel))[:2] != ("second", "m2"):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.02)
        await until(channel, SERVING)
    await serves.__aexit__(None, None, None)


async def test_a_target_of_another_vocabulary_ends_service(
    directory: Path, card: ModelCard, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft worker does not serve for a target with another vocabulary, and logs why.

    Regression: the draft reported SERVING, every request got internal_error, and the log had nothing.
    """
    port = free_port()
    async with target(directory, card, port):
        serves = serving(directory, port)
        channel, web_port = await serves.__aenter__()
        await until(channel, SERVING)
    async with target(directory, replace(card, tokenizer_fingerprint="another"), port):
        await until(channel, NOT_SERVING)
        async with asyncio.timeout(60):
            while "one vocabulary" not in caplog.text:  # noqa: ASYNC110 - the log has no event
                await asyncio.sleep(0.01)
        assert await generated(channel) == tokens_at(3, 20)  # without drafts, for a client that does not look
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{web_port}") as client:
            for where in ("", f"http://127.0.0.1:{PROBE_PORT}"):  # which a kubelet asks
                assert (await client.get(f"{where}/readyz")).status_code == 503
                assert (await client.get(f"{where}/livez")).status_code == 200
    async with target(directory, card, port):
        await until(channel, SERVING)
        assert await generated(channel) == tokens_at(3, 20)
    await serves.__aexit__(None, None, None)


async def test_a_draft_of_another_vocabulary_does_not_start(directory: Path, card: ModelCard) -> None:
    port = free_port()
    async with target(directory, replace(card, tokenizer_fingerprint="another"), port):
        with pytest.raises(IncompatibleDraftError, match="one vocabulary"):
            async with serving(directory, port):
                pass
