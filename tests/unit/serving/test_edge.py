"""Edges (gateways, and drafts that serve requests) whose targets are scripted, and start and stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
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
from specdec.inference.gateway.app import create_app
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving import edge as edge_module
from specdec.inference.serving.edge import Drafting, serve_edge
from specdec.inference.serving.processes import free_port
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls import fleet
from specdec.inference.workers.calls.observer import Observer
from specdec.inference.workers.calls.scope import SupervisedCompleter
from specdec.inference.workers.completing.generation import GenerationServicer
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.remote import RemoteCompleter
from specdec.inference.workers.completion import ModelCard
from specdec.inference.workers.drafting.service import VerificationServicer
from tests.support.completers import CARD, ScriptedCompleter, gateway
from tests.support.models import save_tiny_model
from tests.support.ports import listening
from tests.support.scripted import VOCAB_SIZE, ScriptedDecoder, tokens_at

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
TOPOLOGIES = {"gateway": "gateway", "draft": "distributed"}
"""Kinds of edges, each with the topology that its GetModel reports."""
KINDS = list(TOPOLOGIES)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CLOSE_GRACE_S", 0.05)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("edge"), "llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def card(directory: Path) -> ModelCard:
    return ModelCard("first", "target", 1000, VOCAB_SIZE, Tokenizer.load(directory).fingerprint, model_id="m1")


class Refusing(GenerationServicer):
    """GenerationService whose GetModel raises `errors`, one per call and the last one first, and then works."""

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
    generation = Refusing(completer, card, completer.codec, errors=list(errors))
    async with listening(verification, generation, address=f"127.0.0.1:{port}"):
        try:
            yield
        finally:
            await engine.stop()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds, by asking again and again."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Place:
    """A running gateway or serving draft: its task, a channel to its gRPC port, and its HTTP ports."""

    task: asyncio.Task[None]
    channel: grpc.aio.Channel
    web: int
    probes: int

    async def status(self, path: str, *, of_probes: bool = False) -> int:
        """Return the HTTP status of a path at the HTTP port, or the port of probes; 0 if the port is not open."""
        async with httpx.AsyncClient() as client:
            try:
                url = f"http://127.0.0.1:{self.probes if of_probes else self.web}{path}"
                return (await client.get(url)).status_code
            except httpx.ConnectError:
                return 0

    async def is_at(self, path: str) -> bool:
        """Return whether the port of probes answers 200 at a path."""
        return await self.status(path, of_probes=True) == 200

    async def until(self, status: int) -> None:
        """Wait until the edge's gRPC health service reports this status."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        async with asyncio.timeout(60):
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                if answer.status == status:
                    return

    async def shown(self) -> Any:
        return await rpc.GenerationServiceStub(self.channel).GetModel(pb.GetModelRequest())

    async def has_model(self, model_id: str) -> bool:
        return bool((await self.shown()).model_id == model_id)

    async def generated(self, **fields: Any) -> list[int]:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), max_new_tokens=20, ignore_eos=True, **fields)
        call = rpc.GenerationServiceStub(self.channel).Generate(request, timeout=60)
        return [token_id async for message in call for token_id in message.delta.token_ids]


@asynccontextmanager
async def begun(kind: str, directory: Path, target_port: int) -> AsyncGenerator[Place, None]:
    """Start a gateway, or a draft with this tokenizer and prompt lookup; yield it, before its target is there."""
    server = ServerConfig(port=free_port(), grace_s=0.0, probe_port=free_port())
    link, web = ConnectionConfig("127.0.0.1", target_port, 600.0, reconnect_timeout_s=0.1), HttpConfig(free_port())
    drafting = Drafting(ProposerConfig(directory, None, num_slots=2), DraftConfig(link)) if kind == "draft" else None
    task = asyncio.create_task(serve_edge(link, server, web, ObserveConfig(kind), drafting))
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        try:
            yield Place(task, channel, web.port, server.probe_port or 0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serving(kind: str, directory: Path, target_port: int) -> AsyncGenerator[Place, None]:
    """Start a gateway or a serving draft; yield it once it reports SERVING."""
    async with begun(kind, directory, target_port) as place:
        ready = asyncio.create_task(place.channel.channel_ready())
        await asyncio.wait([place.task, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if place.task.done():
            place.task.result()
        await place.until(SERVING)
        yield place


@pytest.mark.parametrize("kind", KINDS)
async def test_clients_learn_of_another_model_at_the_target(directory: Path, card: ModelCard, kind: str) -> None:
    """When the model at its target changes, a gateway or serving draft tells its clients the new name and template.

    Regression: a draft read name and template once, and served another model's text under the old name; a gateway
    refused the new name.
    """
    port = free_port()
    async with target(directory, card, port):
        serves = serving(kind, directory, port)
        place = await serves.__aenter__()
        model = await place.shown()
        assert (model.name, model.model_id, model.chat_template) == ("first", "m1", "")
        assert model.topology == TOPOLOGIES[kind]
        assert await place.generated() == tokens_at(3, 20)
    await place.until(NOT_SERVING)
    template = "{{ messages[0]['content'] }}"
    second = replace(card, name="second", model_id="m2", chat_template=template, vocab_size=VOCAB_SIZE + 64)
    async with target(directory, second, port):
        await place.until(SERVING)
        model = await place.shown()
        assert (model.name, model.model_id, model.chat_template) == ("second", "m2", template)
        assert model.vocab_size == VOCAB_SIZE + 64  # one tokenizer, padded otherwise
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{place.web}") as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "second"
            assert (await client.get("/v1/models/first")).status_code == 404
            topology = (await client.get("/version")).json()["topology"]
            assert topology == ("target" if kind == "gateway" else "distributed")
        assert await place.status("/readyz") == 200
        assert await place.generated() == tokens_at(3, 20)
    await serves.__aexit__(None, None, None)


@pytest.mark.parametrize(("kind", "error"), [(KINDS[0], DeadlineError), (KINDS[1], UnauthenticatedError)])
async def test_a_target_without_model_card_is_asked_again(
    directory: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch, error: type[SpecDecError], kind: str
) -> None:
    """A gateway or serving draft asks its target for its model again if the target could not answer the first time.

    Regression: a replaced target was asked once; if it was busy then, the old name and template stayed.
    """
    monkeypatch.setattr(fleet, "LOOK_AGAIN_S", 0.05)
    port = free_port()
    async with target(directory, card, port):
        serves = serving(kind, directory, port)
        place = await serves.__aenter__()
    await place.until(NOT_SERVING)
    async with target(directory, replace(card, name="second", model_id="m2"), port, error("not now"), error("not now")):
        await until(lambda: place.has_model("m2"))
        assert (await place.shown()).name == "second"
        await place.until(SERVING)
    await serves.__aexit__(None, None, None)


async def test_a_target_of_another_vocabulary_ends_service(
    directory: Path, card: ModelCard, caplog: pytest.LogCaptureFixture
) -> None:
    """A serving draft reports NOT_SERVING if its target now has another vocabulary, and logs why.

    Regression: the draft reported SERVING, every request got internal_error, and the log had nothing.
    """
    port = free_port()
    async with target(directory, card, port):
        serves = serving("draft", directory, port)
        place = await serves.__aenter__()
    async with target(directory, replace(card, tokenizer_fingerprint="another"), port):
        await place.until(NOT_SERVING)
        async with asyncio.timeout(60):
            while "one vocabulary" not in caplog.text:  # noqa: ASYNC110 - the log has no event
                await asyncio.sleep(0.01)
        assert await place.generated() == tokens_at(3, 20)  # without drafts, for a client that does not look
        for of_probes in (False, True):  # a kubelet asks the latter
            assert await place.status("/readyz", of_probes=of_probes) == 503
            assert await place.status("/livez", of_probes=of_probes) == 200
    async with target(directory, card, port):
        await place.until(SERVING)
        assert await place.generated() == tokens_at(3, 20)
    await serves.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("change", "fault"),
    [({"tokenizer_fingerprint": "another"}, "one vocabulary"), ({"topology": "gateway"}, "a gateway server answers")],
)
async def test_a_draft_starts_at_a_target_of_its_vocabulary_alone(
    directory: Path, card: ModelCard, change: dict[str, str], fault: str
) -> None:
    port = free_port()
    async with target(directory, replace(card, **change), port):  # type: ignore[arg-type]
        with pytest.raises(IncompatibleDraftError, match=fault):
            async with serving("draft", directory, port):
                pass
        async with serving("gateway", directory, port) as place:
            assert await place.generated() == tokens_at(3, 20)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_edge_is_alive_and_as_ready_as_its_servers(directory: Path, card: ModelCard, kind: str) -> None:
    """A gateway or serving draft that has no target is alive but not ready, and says so at each port.

    It waits for a target; a target that is busy when it is asked for its model is asked again.

    Regression: a gateway ended after --connect_timeout_s, and was restarted for as long as a target loaded; without a
    server it answered 503 at its HTTP port, but 200 at its port for probes.
    """
    port = free_port()
    async with begun(kind, directory, port) as place:
        await until(lambda: place.is_at("/livez"))
        assert await place.status("/readyz", of_probes=True) == 503
        assert await place.status("/readyz") == 0, "only the port of probes is open"
        async with target(directory, card, port, DeadlineError("busy")):
            await until(lambda: place.is_at("/readyz"))
            await place.until(SERVING)
            assert await place.status("/readyz") == 200
        assert await place.status("/readyz") == 503
        assert await place.status("/readyz", of_probes=True) == 503
        await place.until(NOT_SERVING)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_edge_that_waits_ends_at_a_signal(directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A gateway or serving draft that waits for its first target ends at a signal.

    A container's first process ignores signals that it does not handle, and would be killed only after 90 s.
    """
    asked = asyncio.Event()
    monkeypatch.setattr(edge_module, "stop_signal", asked.wait)
    async with begun(kind, directory, free_port()) as place, asyncio.timeout(60):
        asyncio.get_running_loop().call_later(0.05, asked.set)
        await place.task


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_reports_the_load_and_ends_the_edge(directory: Path, card: ModelCard, kind: str) -> None:
    """Gateways and serving drafts answer GetLoad, and end after Drain; a gateway reports no slots of its own."""
    port = free_port()
    async with target(directory, card, port), serving(kind, directory, port) as place, asyncio.timeout(60):
        stub = rpc.GenerationServiceStub(place.channel)
        load = await stub.GetLoad(pb.GetLoadRequest())
        assert (load.num_slots, load.num_running, load.draining) == (0 if kind == "gateway" else 2, 0, False)
        await stub.Drain(pb.DrainRequest())
        await place.task


@pytest.mark.parametrize("kind", KINDS)
async def test_the_name_of_a_clients_session_is_its_seed(directory: Path, card: ModelCard, kind: str) -> None:
    """A request's `draft_session`, which gateways and serving drafts do not use, still determines its seed.

    A target does the same. Regression: a serving draft chose another seed.
    """
    port, name = free_port(), bytes(range(16))
    request = pb.GenerateRequest(text="x", max_new_tokens=1, draft_session=name)
    async with target(directory, card, port), serving(kind, directory, port) as place:
        call = rpc.GenerationServiceStub(place.channel).Generate(request, timeout=60)
        started = [message.started async for message in call if message.HasField("started")]
        assert [each.seed for each in started] == [int.from_bytes(name[:8], "big")]


MARKERS = {"<think>": 51, "</think>": 54, "<tool_call>": 58}
"""Tokens of the models below, with their ids; to a prompt of one token the scripted target answers 51, 52, ..."""
TEMPLATE = "{# <think> #}x"


def written(directory: Path, *, special: bool = False, stars: bool = False) -> Path:
    """Save a model with `MARKERS` in its vocabulary; return the directory.

    Args:
        special: the markers are special tokens, and have no text.
        stars: the decoder writes a star for each X.
    """
    save_tiny_model(directory, "llama", vocab_size=VOCAB_SIZE, chat_template=TEMPLATE)
    file = directory / "tokenizer.json"
    fields = json.loads(file.read_text())
    by_id = {token_id: token for token, token_id in fields["model"]["vocab"].items()}
    by_id |= {token_id: marker for marker, token_id in MARKERS.items()}
    fields["model"]["vocab"] = {token: token_id for token_id, token in by_id.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    fields["added_tokens"] += [{"id": at, "content": it, "special": special, **flags} for it, at in MARKERS.items()]
    if stars:
        replacing = {"type": "Replace", "pattern": {"String": "X"}, "content": "*"}
        fields["decoder"] = {"type": "Sequence", "decoders": [fields["decoder"], replacing]}
    file.write_text(json.dumps(fields))
    return directory


async def said(place: Place) -> list[Any]:
    """Return an edge's HTTP answers: without a stop string, with each of two, and to a chat with reasoning."""
    body = {"prompt": [1], "max_tokens": 12, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    answers = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{place.web}/v1", timeout=60) as client:
        for stop in (None, "<tool_call>", "*"):
            answer = (await client.post("/completions", json={**body, "stop": stop})).json()
            answers.append((answer["choices"], answer["usage"]["completion_tokens"]))
        answers.append((await client.post("/chat/completions", json=chat)).json()["choices"])
    return answers


@pytest.mark.parametrize(
    ("change", "differs"),
    [({"special": True}, "target"), ({"special": True}, "draft"), ({"stars": True}, "draft"), ({}, "draft")],
)
async def test_text_at_an_edge_is_the_targets(tmp_path: Path, change: dict[str, bool], differs: str) -> None:
    """A serving draft whose tokenizer decodes the target's token ids to other text still gives the target's text.

    The files of `differs`, target or draft, are made with `change`, arguments of `written`.

    Regression: the draft's tokenizer made the text. A token that was special in its files alone was left out, did not
    stop the answer and did not end the reasoning, and another decoder changed the text.
    """
    paths = {name: written(tmp_path / name, **(change if name == differs else {})) for name in ("target", "draft")}
    theirs, own = (Tokenizer.load(path) for path in paths.values())
    assert theirs.fingerprint == own.fingerprint
    assert (theirs.text_fingerprint == own.text_fingerprint) == (not change)
    card = ModelCard(
        *("m", "target", 1000, VOCAB_SIZE, theirs.fingerprint, TEMPLATE), text_fingerprint=theirs.text_fingerprint
    )
    port = free_port()
    async with (
        target(paths["target"], card, port),
        serving("gateway", paths["draft"], port) as plain,
        serving("draft", paths["draft"], port) as drafted,
    ):
        right = await said(plain)
        assert await said(drafted) == right
    ids = list(range(51, 63))
    assert (theirs.decode(ids) == own.decode(ids)) == (not change), "the change is one of text"


async def test_a_deadline_is_one_on_both_sides() -> None:
    """Gateway and target both count a request that exceeds its deadline as DEADLINE_EXCEEDED.

    Regression: both counted such a request as CANCELLED, as if the client had
    left.
    """
    metrics = Metrics("tiny")
    hanging = SupervisedCompleter(ScriptedCompleter([["a"]], gap_s=30.0), Observer(metrics))
    async with (
        listening(GenerationServicer(hanging, CARD)) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        front = gateway(RemoteCompleter(channel, "behind", deadline_s=10.0), deadline_s=1.0)
        transport = httpx.ASGITransport(create_app(front))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            late = await client.post("/v1/completions", json={"prompt": "x", "n": 2})
            counted = (await client.get("/metrics")).text
    assert (late.status_code, late.json()["error"]["message"]) == (504, "the request is not finished after 1 s")
    line = 'specdec_request_failures_total{code="DEADLINE_EXCEEDED",model_name="tiny"} 2.0'
    assert line in counted
    assert line in metrics.exposition().decode()
