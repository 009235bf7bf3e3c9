"""What callers may do at a server, by their access tokens and client certificates, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.grpc_comm.call import Call
from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.grpc_comm.watched import UnusableError
from specdec.inference.caller import ANYBODY, Caller, NamesRequests, Right, request_context
from specdec.inference.config import ConnectionConfig, DialSecurity, PortSecurity
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.target import TargetEngine
from specdec.inference.errors import ForbiddenError, HandshakeError, InvalidRequestError, UnauthenticatedError
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls import access, admitting
from specdec.inference.workers.calls.access import Access, rights_of_call
from specdec.inference.workers.calls.convert import PROTOCOL_VERSION
from specdec.inference.workers.calls.dialling import credentials_of
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.remote import card_of, card_of_target
from specdec.inference.workers.completion import CompletionRequest
from specdec.inference.workers.drafting.service import VerificationServicer
from tests.support.certificates import Pki, pki
from tests.support.completers import CARD, ScriptedCompleter
from tests.support.ports import Served, YesMan, entry, https, served, token_of
from tests.support.scripted import VOCAB_SIZE, ScriptedDecoder

ROLES = ("client", "worker", "ops", "admin")
WORDS = Vocabulary("f", VOCAB_SIZE)
EDGE = "spiffe://example.org/edge"


def write(path: Path, text: str) -> None:
    path.write_text(text)


def cut_in_half(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


@pytest.fixture
def trust(tmp_path: Path) -> Pki:
    return pki(tmp_path / "ours")


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    path = tmp_path / "auth.toml"
    certificate = f'[[certificate]]\nname = "edge"\nsan = "{EDGE}"\nroles = ["client"]\n'
    path.write_text("".join(entry(role, role) for role in ROLES) + certificate)
    return path


@pytest.fixture
async def at(trust: Pki, auth_file: Path) -> AsyncGenerator[Served, None]:
    async with served(PortSecurity(*trust.pair("server"), trust.ca, 1, auth_file)) as ports:
        yield ports


def dialling(trust: Pki, *, token: str | None = None, certificate: str | None = None) -> DialSecurity:
    file = trust.folder / "token"
    if token is not None:
        file.write_text(token)
    pair = (None, None) if certificate is None else trust.pair("client", certificate)
    return DialSecurity(trust.ca, pair[0], pair[1], token_file=None if token is None else file)


@asynccontextmanager
async def remote(port: int, security: DialSecurity) -> AsyncGenerator[FailoverCompleter, None]:
    """Yield a completer that calls the gRPC server at this port."""
    link = ConnectionConfig("127.0.0.1", port, 60.0, security=security)
    async with connected(link) as fleet:
        yield FailoverCompleter(fleet, link)


METHODS = {
    "client": "/specdec.v1.GenerationService/Generate",
    "model": "/specdec.v1.GenerationService/GetModel",
    "worker": "/specdec.v1.VerificationService/Assist",
    "load": "/specdec.v1.GenerationService/GetLoad",
    "drain": "/specdec.v1.GenerationService/Drain",
    "ops": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "health": "/grpc.health.v1.Health/Check",
}
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def refusals(port: int, security: DialSecurity) -> dict[str, str]:
    """Call every method of `METHODS`; return the errors of the calls that are refused, by the methods' names.

    The server's refusal may be lost before the call's first write (grpc issue 36066), so such a call is made again.
    """
    found: dict[str, str] = {}
    async with open_channel(f"127.0.0.1:{port}", credentials_of(security)) as channel:
        for name, path in [*METHODS.items()] * 3:
            if name not in found and (words := await refusal(channel.stream_stream(path))):
                found[name] = words
    return found


async def test_a_call_has_one_token(at: Served, trust: Pki) -> None:
    """A call with two access tokens is refused.

    Regression: the server used the last of two tokens, and a proxy in front of it may have checked the
    first.
    """
    metadata = [("authorization", f"Bearer {token_of(role)}") for role in ("client", "ops")]
    async with open_channel(f"127.0.0.1:{at.grpc}", credentials_of(dialling(trust))) as channel:
        stub = rpc.GenerationServiceStub(channel)
        assert (await stub.GetModel(pb.GetModelRequest(), metadata=metadata[:1])).name == CARD.name
        with pytest.raises(grpc.aio.AioRpcError, match="more than one authorization") as caught:
            await stub.GetModel(pb.GetModelRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def refusal(begin: Any) -> str | None:
    """Begin a gRPC call with an empty message; return the error of its refusal, or None if it is not refused."""

    async def nothing() -> AsyncGenerator[bytes, None]:
        yield b""

    call = begin(nothing())
    try:
        async for _ in call:
            break
    except grpc.aio.AioRpcError as exc:
        return f"{exc.code().name}: {exc.details()}" if exc.code() in REFUSED else None
    finally:
        call.cancel()
    return None


ALLOWED = {
    "client": {"client", "model", "worker", "load", "health"},
    "worker": {"worker", "health"},
    "ops": {"ops", "load", "health"},
    "admin": {"load", "drain", "health"},
}


def test_an_unlisted_method_needs_the_right_of_operation() -> None:
    """A method that no rule names needs the right to operate the server (`OPS`), which clients lack.

    Regression: a method that a later version added would have been open to all clients.
    """
    services = pb.DESCRIPTOR.services_by_name.values()
    paths = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert paths == {path for path in access._METHODS if path.startswith("/specdec.")}
    assert all(rights_of_call(f"{path}2") == {Right.OPS} for path in paths)


async def test_a_role_grants_its_rights_alone(at: Served, trust: Pki) -> None:
    for role in ROLES:
        refused = await refusals(at.grpc, dialling(trust, token=token_of(role)))
        assert set(refused) == set(METHODS) - ALLOWED[role]
        for name, words in refused.items():
            wanted = {
                "model": "client",
                "worker": "client or worker",
                "load": "admin or client or ops",
                "drain": "admin",
            }.get(name, name)
            assert words == f"PERMISSION_DENIED: {role} has role {role}, and this needs {wanted}"


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "no token came: a header Authorization: Bearer TOKEN is expected (--token_file)"),
        ("token-of-clien", "the token is not known here"),
    ],
)
async def test_strangers_get_the_reason_and_nothing_else(
    at: Served, trust: Pki, token: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    refused = await refusals(at.grpc, dialling(trust, token=token))
    assert refused == dict.fromkeys(METHODS, f"UNAUTHENTICATED: {words}")
    async with https(trust) as client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        for path in ("/v1/models", "/health", "/metrics", "/docs", "/openapi.json"):
            answer = await client.get(f"https://127.0.0.1:{at.http}{path}", headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            error = {"message": words, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
            assert answer.json() == {"error": error}
        assert (await client.get(f"https://127.0.0.1:{at.metrics}/", headers=headers)).status_code == 401
        assert answer.headers["x-request-id"] != ""
    assert "token-of" not in caplog.text


async def test_http_asks_for_the_same_tokens(at: Served, trust: Pki) -> None:
    async with https(trust) as client:

        async def status(path: str, role: str, port: int = at.http) -> int:
            headers = {"Authorization": f"Bearer {token_of(role)}"}
            return (await client.get(f"https://127.0.0.1:{port}{path}", headers=headers)).status_code

        assert [await status("/v1/models", role) for role in ROLES] == [200, 403, 403, 403]
        assert [await status("/metrics", role) for role in ROLES] == [403, 403, 200, 403]
        assert [await status("/", role, at.metrics) for role in ROLES] == [403, 403, 200, 403]
        assert [await status("/health", role) for role in ROLES] == [200] * 4
        assert (await client.get(f"https://127.0.0.1:{at.http}/")).status_code == 200  # the page asks for a token
        assert (await client.get(f"http://127.0.0.1:{at.probes}/readyz")).status_code == 200
        body, key = {"prompt": "x"}, {"Authorization": f"Bearer {token_of('worker')}"}
        answer = await client.post(f"https://127.0.0.1:{at.http}/v1/completions", json=body, headers=key)
        assert answer.json()["error"]["code"] == "insufficient_permissions"


async def test_a_certificate_is_a_role_on_its_own_port(at: Served, trust: Pki, tmp_path: Path) -> None:
    edge = dialling(trust, certificate=EDGE)
    assert set(await refusals(at.mtls, edge)) == set(METHODS) - ALLOWED["client"]
    assert (await refusals(at.mtls, edge))["drain"] == "PERMISSION_DENIED: edge has role client, and this needs admin"
    other = await refusals(at.mtls, dialling(trust, certificate="spiffe://example.org/other"))
    words = "PERMISSION_DENIED: the certificate of spiffe://example.org/other has no role here"
    assert other == dict.fromkeys(METHODS, words)
    both = await refusals(at.mtls, dialling(trust, certificate=EDGE, token=token_of("client")))
    words = "UNAUTHENTICATED: a token came to the port of client certificates: send it to the other one"
    assert both == dict.fromkeys(METHODS, words)
    unasked = await refusals(at.grpc, dialling(trust, certificate=EDGE))  # there, a certificate counts for nothing
    assert all(words.startswith("UNAUTHENTICATED: no token came") for words in unasked.values())


async def test_a_caller_without_its_certificate_gets_the_reason(at: Served, trust: Pki) -> None:
    with pytest.raises(HandshakeError, match=r"wants a client certificate \(--tls_client_cert\)"):
        async with connected(ConnectionConfig("127.0.0.1", at.mtls, 2.0, security=dialling(trust))):
            pass


async def test_a_revoked_token_ends_with_the_file(at: Served, trust: Pki, auth_file: Path) -> None:
    """An access token that is removed from the server's auth file is refused, on open connections too.

    While the auth file is only half written, the tokens from before stay valid.
    """
    link = ConnectionConfig("127.0.0.1", at.grpc, 60.0, security=dialling(trust, token=token_of("client")))
    async with connected(link) as fleet:
        assert await card_of(fleet) == CARD
        cut_in_half(auth_file)
        assert await card_of(fleet) == CARD
        write(auth_file, entry("other", "client"))
        with pytest.raises(UnauthenticatedError, match="the token is not known here"):
            await card_of(fleet)
        write(trust.folder / "token", token_of("other"))  # the client follows its file too
        assert await card_of(fleet) == CARD


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (entry("other", "worker"), "the token is not known here"),
        (entry("worker", "client"), "worker has lost role worker"),
    ],
)
async def test_a_revoked_pool_worker_is_let_go(
    left: str,
    words: str,
    trust: Pki,
    auth_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A draft worker is detached when the file of access tokens no longer gives it the right.

    The file then has the content `left`; the error of the call has `words`.

    Regression: rights were checked only when a call began, so a worker without the right read all prompts while its
    call lasted.
    """

    async def attached(_: object, message: object, call: Call) -> None:
        await call.write(pb.AssistResponse())
        await asyncio.sleep(600)

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(YesMan, "Assist", attached)
    monkeypatch.setattr(admitting, "ASK_AGAIN_S", 0.05)
    async with served(PortSecurity(*trust.pair("server"), auth_file=auth_file)) as at:
        keys = credentials_of(dialling(trust, token=token_of("worker")))
        async with open_channel(f"127.0.0.1:{at.grpc}", keys) as channel, asyncio.timeout(60):
            call = rpc.VerificationServiceStub(channel).Assist()
            await call.write(pb.AssistRequest())
            await call.read()
            cut_in_half(auth_file)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(reading := asyncio.ensure_future(call.read())), 0.3)
            write(auth_file, left)
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await reading
    (line,) = [record.getMessage() for record in caplog.records if record.name == "specdec.audit"]
    assert "caller=worker" in line
    assert re.search(rf"status=(UNAUTHENTICATED|PERMISSION_DENIED) at {METHODS['worker']}$", line)


async def test_a_draft_worker_that_is_refused_does_not_start(at: Served, trust: Pki) -> None:
    for token, error in (("wrong", UnauthenticatedError), (token_of("ops"), ForbiddenError)):
        link = ConnectionConfig("127.0.0.1", at.grpc, 60.0, security=dialling(trust, token=token))
        async with connected(link) as fleet:
            with pytest.raises(error):
                await card_of_target(fleet)


async def attaching(port: int, security: DialSecurity, **fields: Any) -> str:
    """Attach a draft worker; return its worker id, or if it is refused, "STATUS: message".

    `fields` replace those of the Attach message.
    """
    words = {"tokenizer_fingerprint": WORDS.fingerprint, "vocab_size": WORDS.size}
    attach = pb.Attach(**{"protocol_version": PROTOCOL_VERSION, "num_slots": 1, **words, **fields})
    async with open_channel(f"127.0.0.1:{port}", credentials_of(security)) as channel:
        call = rpc.VerificationServiceStub(channel).Assist()
        try:
            await call.write(pb.AssistRequest(attach=attach))
            return str((await call.read()).attached.worker_id)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return f"{(await call.code()).name}: {await call.details()}"
        finally:
            call.cancel()


def verification() -> VerificationServicer:
    return VerificationServicer(DraftPool(TargetEngine(ScriptedDecoder())), WORDS)


@pytest.mark.parametrize("insecure", [True, False])
async def test_a_pool_worker_needs_a_role_off_loopback(insecure: bool, trust: Pki) -> None:
    """Without access tokens, a worker on another machine may draft for its own client, but not for all clients.

    Regression: any peer that attached as a worker got the prompts of all clients.
    """
    security = PortSecurity(insecure=True) if insecure else PortSecurity(*trust.pair("server"))
    async with served(security, verification=verification(), host="0.0.0.0") as at:
        dial = DialSecurity() if insecure else dialling(trust)
        refusal = await attaching(at.grpc, dial)
        assert (await attaching(at.grpc, dial, is_private=True)).startswith("w")
    words = "PERMISSION_DENIED: without an auth file all may do everything but help: worker needs an --auth_file"
    assert refusal == words


async def test_a_client_may_draft_for_itself_alone(trust: Pki, auth_file: Path) -> None:
    async with served(PortSecurity(*trust.pair("server"), auth_file=auth_file), verification=verification()) as at:

        async def answer(role: str, **fields: Any) -> str:
            return await attaching(at.grpc, dialling(trust, token=token_of(role)), **fields)

        for role, is_private in (("client", True), ("worker", False), ("worker", True)):
            assert (await answer(role, is_private=is_private)).startswith("w")
        assert (await answer("worker", protocol_version=1)).startswith("w")
        words = "PERMISSION_DENIED: client has role client, and this needs worker"
        assert await answer("client") == words
        for fields, refusal in UNFIT:
            assert re.match(refusal, await answer("worker", **fields))


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"protocol_version": 0}, "FAILED_PRECONDITION: .* version 0, the target 1 to 2"),
    ({"protocol_version": 3}, "FAILED_PRECONDITION: .* version 3, the target 1 to 2"),
    ({"tokenizer_fingerprint": "another"}, "FAILED_PRECONDITION: .*one vocabulary"),
    ({"num_slots": 0}, "INVALID_ARGUMENT: num_slots 0"),
    ({"num_slots": 4097}, "INVALID_ARGUMENT: num_slots 4097"),
]


def test_the_role_of_draft_workers_counts_as_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The role `draft` in old auth files counts as `client`, not as `worker`, which may read all prompts."""
    file = tmp_path / "auth.toml"
    file.write_text(entry("edge", "draft"))
    access = Access(file)
    assert access.by_token(f"Bearer {token_of('edge')}", frozenset({Right.CLIENT})).rights == {Right.CLIENT}
    (record,) = caplog.records
    assert record.getMessage() == 'edge: role "draft" counts as "client", which may draft for its own requests'


async def test_loopback_needs_no_credentials() -> None:
    async with served(PortSecurity()) as at:
        assert await refusals(at.grpc, DialSecurity()) == {}


def group(name: str | None, *accounts: str | int, callers: str = entry("a", "client") + entry("b", "client")) -> str:
    named = "" if name is None else f'name = "{name}"\n'
    return f"{callers}[[prefix_group]]\n{named}accounts = {list(accounts)}\n"


BROKEN = {
    "": "names no caller",
    "[[token]]": "name None is none of",
    '[[token]]\nname = "a"\nroles = ["client"]': "a: sha256 is missing",
    '[[token]]\nname = "a"\nroles = ["client"]\nsha256 = "12"': "a: sha256 is not 64 hexadecimal digits",
    entry("a", "root"): "roles .'root'. are none of client, worker, ops, admin",
    entry("a", "client") * 2: "name a is there twice",
    entry("a", "client", "limit = 3"): "a has limit; known are limits, name",
    entry("a", "client", "limits = { n = 0 }"): "a: limit n 0 must be a whole number from 1 on",
    entry("a", "client")[:-30]: "Unterminated string",
    '[[certificate]]\nname = "a"\nroles = ["client"]': "a: san is missing",
    entry("a", "client", 'speaks_for_others = "true"'): "a: speaks_for_others 'true' is neither true nor false",
    "prefix_group = 3\n" + entry("a", "client"): r"prefix_group 3 is not a list of tables: \[\[prefix_group\]\]",
    entry("a", "client") + "[prefix_group]": "prefix_group {} is not a list of tables",
    group(None, "a"): "name of a prefix_group: None is none of 1 to 64 letters",
    group("g"): r"prefix_group g: accounts \[\] must be a list of at least one name",
    group("g", 3): "prefix_group g: account 3 is none of 1 to 64 letters",
    group("g", "a", "eve"): "prefix_group g: account eve has no entry in this file",
    group("g", "a") + group("h", "a", callers=""): "prefix_group h: account a is in g already",
    group("g", "a") + group("g", "b", callers=""): "prefix_group g is there twice",
    group("g", "a") + 'more = "x"': "prefix_group g has more; known are accounts, name",
}


@pytest.mark.parametrize(("text", "words"), BROKEN.items(), ids=BROKEN.values())
def test_an_invalid_file_names_its_fault(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "auth.toml"
    path.write_text(text)
    with pytest.raises(UnusableError, match=f"{path}: .*{words}"):
        Access(path)


@pytest.mark.parametrize("user", ["a" * 65, "root caller=x status=OK"])
async def test_a_user_whose_name_no_account_can_have_is_refused(trust: Pki, auth_file: Path, user: str) -> None:
    """The name of a user, which a gateway passes on, must be one that an account in an auth file may have.

    Regression: long names were cut, so two names with the same beginning were one account; names with spaces wrote
    further fields into lines of the audit log.
    """
    write(auth_file, entry("gateway", "client", "speaks_for_others = true"))
    async with (
        served(PortSecurity(*trust.pair("server"), auth_file=auth_file)) as at,
        remote(at.grpc, dialling(trust, token=token_of("gateway"))) as gateway,
    ):
        with request_context(Caller("a" * 64), ""):
            assert [event async for event in gateway.complete(CompletionRequest("x"))]
        with (
            request_context(Caller(user), ""),
            pytest.raises(InvalidRequestError, match="must be 1 to 64 letters, digits and"),
        ):
            await anext(gateway.complete(CompletionRequest("x")))


async def test_a_gateway_names_the_account_of_each_request(
    trust: Pki, auth_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway may name the account of a request, a client may not; both servers' logs have the same request id."""
    caplog.set_level(logging.INFO)
    write(auth_file, entry("gateway", "client", "speaks_for_others = true") + entry("client", "client"))
    security = PortSecurity(*trust.pair("server"), auth_file=auth_file)
    async with served(security) as at:
        for name in ("gateway", "client"):
            async with remote(at.grpc, dialling(trust, token=token_of(name))) as asking:
                with request_context(Caller("alice"), "id-of-alice"):
                    _ = [event async for event in asking.complete(CompletionRequest("x"))]
        async with https(trust) as client:
            headers = {"Authorization": f"Bearer {token_of('client')}", "X-Request-Id": "id-of-bob"}
            url = f"https://127.0.0.1:{at.http}/v1/completions"
            assert (await client.post(url, json={"prompt": "x"}, headers=headers)).headers[
                "x-request-id"
            ] == "id-of-bob"
    lines = [record.getMessage().partition(" model=")[0] for record in caplog.records if record.name == "specdec.audit"]
    lines = [re.sub(r" peer=127\.0\.0\.1:\d+", "", line) for line in lines]
    assert lines == [
        "request=id-of-alice caller=gateway user=alice",
        "request=id-of-alice caller=client user=-",
        "request=id-of-bob caller=client user=-",
    ]


async def test_refusals_leave_a_line_and_their_id(at: Served, trust: Pki, caplog: pytest.LogCaptureFixture) -> None:
    """Each refusal has a line in the audit log, and its error has the request's id.

    Regression: the audit log lacked refused callers, their addresses and attached workers; gRPC errors lacked the
    request's id.
    """
    caplog.set_level(logging.INFO)
    asked, body = (("x-request-id", "mine"),), {"prompt": "x", "max_tokens": "many"}
    for name, path in (("nobody", "model"), ("client", "drain"), ("client", "client"), ("worker", "worker")):
        security = dialling(trust, token=token_of(name))
        async with open_channel(f"127.0.0.1:{at.grpc}", credentials_of(security)) as channel:
            begin: Any = channel.unary_unary(METHODS[path])
            call = begin(b"", metadata=asked)
            assert dict(await call.trailing_metadata() or ())["x-request-id"] == "mine"
            call.cancel()
    async with https(trust) as client:
        headers = {"Authorization": f"Bearer {token_of('client')}", "X-Request-Id": "mine"}
        for path, status in (("/metrics", 403), ("/v1/completions", 400)):
            answer = await client.post(f"https://127.0.0.1:{at.http}{path}", json=body, headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
    lines = [record.getMessage() for record in caplog.records if record.name == "specdec.audit"]
    assert all(re.match(r"request=mine peer=127\.0\.0\.1:\d+ caller=", line) for line in lines)
    callers = [line.partition("caller=")[2].partition(" ")[0] for line in lines]
    assert callers == ["-", "client", "client", "worker", "client", "client"]
    assert [line.partition("status=")[2].partition(":")[0] for line in lines] == [
        f"UNAUTHENTICATED at {METHODS['model']}",
        f"PERMISSION_DENIED at {METHODS['drain']}",
        f"INVALID_ARGUMENT at {METHODS['client']}",
        f"OK at {METHODS['worker']}",
        "PERMISSION_DENIED at '/metrics'",
        "400 at '/v1/completions'",
    ]


async def test_a_refusal_of_metrics_has_an_id_and_a_peer(
    at: Served, trust: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    """The audit line about a refusal at the metrics port has the request's id and the caller's address.

    Regression: the audit line of the metrics port had neither.
    """
    caplog.set_level(logging.INFO)
    async with https(trust) as client:
        answer = await client.get(f"https://127.0.0.1:{at.metrics}/metrics", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "specdec.audit"]
    assert re.match(r"request=mine peer=127\.0\.0\.1:\d+ caller=- user=- .*status=UNAUTHENTICATED at '/metrics'", line)


def test_a_line_about_a_file_belongs_to_no_request(auth_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log line about a changed file of access tokens has no request's id.

    Regression: it had the id of the request that happened to come first after the change.
    """
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(NamesRequests())
    access = Access(auth_file)
    cut_in_half(auth_file)
    with request_context(ANYBODY, "mine"):
        access.by_token(f"Bearer {token_of('client')}", frozenset({Right.CLIENT}))
        write(auth_file, entry("client", "client"))
        access.by_token(f"Bearer {token_of('client')}", frozenset({Right.CLIENT}))
        logging.getLogger("specdec").info("one of the request's own")
    lines = [record.request for record in caplog.records]  # type: ignore[attr-defined]
    assert lines == ["", "", "[mine] "]


async def test_a_key_has_limits_of_its_own(trust: Pki, auth_file: Path) -> None:
    """A caller's limits are enforced: higher values are refused, and values not given default to at most the limit.

    Regression: a completion without max_tokens asks for 16 tokens, so a caller with a limit of 8 was refused.
    """
    write(auth_file, entry("client", "client", "limits = { max_tokens = 8, n = 2, in_flight = 4 }"))
    security = PortSecurity(*trust.pair("server"), auth_file=auth_file)
    scripted = ScriptedCompleter([["a"]])
    async with served(security, scripted) as at, https(trust) as client:
        url, headers = f"https://127.0.0.1:{at.http}/v1", {"Authorization": f"Bearer {token_of('client')}"}
        for body, words in (
            ({"prompt": "x", "max_tokens": 9}, "max_new_tokens 9 is above the limit of client: 8"),
            ({"prompt": "x", "max_tokens": 8, "n": 3}, "the limit is 2"),
        ):
            answer = await client.post(f"{url}/completions", json=body, headers=headers)
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert (await client.post(f"{url}/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
        assert (await client.post(f"{url}/chat/completions", json=chat, headers=headers)).status_code == 200
    assert [request.max_new_tokens for request in scripted.requests] == [8, 8]
