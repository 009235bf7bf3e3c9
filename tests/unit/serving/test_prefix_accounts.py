"""Cached prefixes of prompts belong to an account: `cached_tokens` never counts tokens of another account's prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.caller import Caller
from specdec.inference.commit import Started
from specdec.inference.config import ConnectionConfig, DialSecurity, DraftConfig, PortSecurity
from specdec.inference.engine.contract import VerificationSession
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.draft_session import DraftSession
from specdec.inference.engine.pool import DraftPool
from specdec.inference.engine.prefixes import Prefix
from specdec.inference.engine.target import TargetEngine
from specdec.inference.model.decoder import Decoder
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.text.vocabulary import Vocabulary
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.local import LocalCompleter
from specdec.inference.workers.completing.reading import Reader
from specdec.inference.workers.completion import CompletionRequest
from specdec.inference.workers.drafting.private import PrivateWorker
from specdec.inference.workers.drafting.service import VerificationServicer
from tests.support.models import DEFAULT_VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.support.ports import Served, entry, served, token_of
from tests.support.scripted import SilentWorker, until

WORDS = Vocabulary("f", DEFAULT_VOCAB_SIZE)
SYSTEM = "Alice's safe opens with the code "
SECRET = f"{SYSTEM}271828"
CLIENTS = "".join(entry(name, "client") for name in ("alice", "bob", "carol"))
SHOP = '[[prefix_group]]\nname = "shop"\naccounts = ["alice", "carol"]\n'


def backend(*, seed: int) -> TorchBackend:
    return TorchBackend(tiny_model("llama", seed=seed), num_slots=6, max_length=128)


def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), frozenset())


class Drafting(DraftEngine):
    """Draft engine that records the prompt and the cache salt of each session, as a prefix."""

    def __init__(self) -> None:
        super().__init__(ModelProposer(backend(seed=2)))
        self.wanted: list[Prefix] = []

    def open(self, token_ids: Sequence[int], *args: Any, **others: Any) -> DraftSession:
        session = super().open(token_ids, *args, **others)
        self.wanted.append(Prefix(tuple(token_ids), len(token_ids), session.wanted.salt))
        return session


class Helper(SilentWorker):
    """Draft worker that never drafts, and records the cache salt of each session."""

    def __init__(self, pool: DraftPool, salts: list[str]) -> None:
        super().__init__("w", 9, pool)
        self._salts = salts

    def open(self, session: VerificationSession) -> None:
        self._salts.append(session.request.cache_salt)


@dataclass
class Scene:
    """Builder of targets, gateways and serving drafts, which run until `stack` closes; their files are in `folder`."""

    folder: Path
    stack: AsyncExitStack

    def port_security(self, name: str, auth: str | None) -> PortSecurity:
        if auth is None:
            return PortSecurity()
        file = self.folder / f"{name}.toml"
        file.write_text(auth)
        return PortSecurity(auth_file=file)

    def link(self, at: Served, who: str) -> ConnectionConfig:
        file = self.folder / f"token of {who}"
        file.write_text(token_of(who))
        return ConnectionConfig("127.0.0.1", at.grpc, 60.0, security=DialSecurity(token_file=file))

    async def target(self, auth: str | None, *, fused: bool = False, salts: list[str] | None = None) -> Served:
        decoder: Decoder = SlotDecoder(backend(seed=1))
        if fused:
            decoder = SpeculativeDecoder(SlotDecoder(backend(seed=1)), ModelProposer(backend(seed=2)))
        engine = await self.stack.enter_async_context(running(TargetEngine(decoder)))
        pool = DraftPool(engine)
        if salts is not None:
            pool.attach(Helper(pool, salts))
        verification = VerificationServicer(pool, WORDS)
        security = self.port_security("target", auth)
        return await self.stack.enter_async_context(served(security, LocalCompleter(pool, tokenizer()), verification))

    async def gateway(self, target: Served, auth: str | None, *, who: str = "gateway") -> Served:
        link = self.link(target, who)
        fleet = await self.stack.enter_async_context(connected(link))
        security = self.port_security("gateway", auth)
        return await self.stack.enter_async_context(served(security, FailoverCompleter(fleet, link)))

    async def draft(self, target: Served, auth: str | None, drafting: Drafting, *, who: str = "edge") -> Served:
        link = self.link(target, who)
        fleet = await self.stack.enter_async_context(connected(link))
        engine = await self.stack.enter_async_context(running(drafting))
        reader = Reader(tokenizer(), max_length=128, vocab_size=WORDS.size)
        worker = PrivateWorker(engine, fleet, DraftConfig(link), WORDS, reader)
        self.stack.push_async_callback(worker.stop)
        await until(lambda: any(stream.is_attached for stream, _ in worker._streams.values()))
        security = self.port_security("draft", auth)
        return await self.stack.enter_async_context(served(security, FailoverCompleter(fleet, link, worker.complete)))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncGenerator[Scene, None]:
    async with AsyncExitStack() as stack:
        yield Scene(tmp_path, stack)


Ask = Callable[..., Awaitable[int]]
"""Function that sends a prompt as an account, and returns how many of its tokens were cached."""


@asynccontextmanager
async def over_http(at: Served) -> AsyncGenerator[Ask, None]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{at.http}", timeout=60) as client:

        async def ask(who: str, prompt: str = SECRET, **salt: str) -> int:
            headers, body = {"Authorization": f"Bearer {token_of(who)}"}, {"prompt": prompt, "max_tokens": 3, **salt}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            details = answer.json()["usage"]["prompt_tokens_details"] or {}
            return int(details.get("cached_tokens", 0))

        yield ask


@asynccontextmanager
async def over_grpc(scene: Scene, at: Served) -> AsyncGenerator[Ask, None]:
    async def ask(who: str, prompt: str = SECRET, cache_salt: str = "") -> int:
        link = scene.link(at, who)
        async with connected(link) as fleet:
            request = CompletionRequest(prompt, max_new_tokens=3, cache_salt=cache_salt)
            events = [event async for event in FailoverCompleter(fleet, link).complete(request)]
        (started,) = [event for event in events if isinstance(event, Started)]
        return started.num_cached_tokens

    yield ask


async def check_separate(ask: Ask) -> None:
    """Assert that Bob learns nothing of Alice's prompts; accounts reuse their own prefixes and those of their group."""
    whole = len(tokenizer().encode(SECRET)) - 1
    assert await ask("alice") == 0
    assert [await ask("bob", f"{SYSTEM}{guess}") for guess in ("1", "2")] == [0, len(tokenizer().encode(SYSTEM))]
    assert await ask("alice") == await ask("carol") == await ask("alice") == whole
    for who, cached in (("alice", 0), ("bob", 0), ("carol", whole), ("bob", whole)):
        assert await ask(who, cache_salt="the same") == cached
    assert await ask("alice", cache_salt="another") == 0


@pytest.mark.parametrize("fused", [False, True], ids=["target", "fused"])
@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_an_account_learns_nothing_of_anothers_prompts(scene: Scene, door: str, fused: bool) -> None:
    """An account learns nothing of the prompts of another account from `cached_tokens`.

    Regression: with 60 requests and their `cached_tokens`, Bob found six secret digits of Alice's prompt.
    """
    at = await scene.target(CLIENTS + SHOP, fused=fused)
    async with over_http(at) if door == "http" else over_grpc(scene, at) as ask:
        await check_separate(ask)


async def test_a_gateways_accounts_are_separate(scene: Scene) -> None:
    """Users whom a gateway names to the target are separate accounts there, and share no cached prefixes."""
    target = await scene.target(entry("gateway", "client", "speaks_for_others = true") + SHOP)
    async with over_http(await scene.gateway(target, CLIENTS)) as ask:
        await check_separate(ask)


async def test_a_gateway_without_accounts_of_users_is_one_account(scene: Scene) -> None:
    target = await scene.target(entry("gateway", "client") + entry("bob", "client"))
    async with over_http(await scene.gateway(target, CLIENTS)) as ask, over_http(target) as directly:
        assert await ask("alice") == 0
        assert await ask("bob") > 0
        assert await directly("bob") == 0


@pytest.mark.parametrize("more", ["", "speaks_for_others = true"], ids=["for itself", "for others"])
async def test_accounts_of_a_serving_draft_are_separate(scene: Scene, more: str) -> None:
    """Accounts of a serving draft share no cached prefixes, even if its target knows the draft's account alone.

    `more` is a further line of the draft's entry in its target's auth file.
    """
    target = await scene.target(entry("edge", "client", more) + (SHOP if more else ""))
    drafting = Drafting()
    async with over_http(await scene.draft(target, CLIENTS + SHOP, drafting)) as ask:
        await check_separate(ask)
        drafting.wanted.clear()
        for who in ("alice", "bob", "carol"):
            await ask(who)
    alice, bob, carol = drafting.wanted
    assert (alice.num_shared(bob), carol.num_shared(bob), alice.num_shared(carol)) == (0, 0, alice.length)


async def test_draft_workers_of_two_accounts_are_separate(scene: Scene) -> None:
    target = await scene.target(entry("edge-1", "client") + entry("edge-2", "client"))
    for who in ("edge-1", "edge-2"):
        async with over_http(await scene.draft(target, None, Drafting(), who=who)) as ask:
            assert await ask("alice") == 0
            assert await ask("bob") > 0


async def test_workers_of_the_pool_keep_accounts_apart_too(scene: Scene) -> None:
    """Draft workers that draft for all clients do not share cached prefixes between accounts.

    They report no cached tokens, but the time of their first proposal would reveal a shared prefix.
    """
    salts: list[str] = []
    target = await scene.target(CLIENTS + SHOP, salts=salts)
    async with over_http(target) as ask:
        for who in ("alice", "bob", "carol", "bob"):
            await ask(who)
    alice, bob, carol, again = salts
    assert (alice == carol, bob == again, alice == bob) == (True, True, False)


async def test_without_an_auth_file_all_share(scene: Scene) -> None:
    target = await scene.target(None)
    async with over_http(target) as ask:
        assert await ask("alice", cache_salt="a") == 0
        assert await ask("bob", cache_salt="a") > 0
        assert await ask("bob", cache_salt="b") == 0


names = st.text('ab:,"[]', min_size=1, max_size=3)
callers = st.builds(
    lambda name, user, group: Caller(name, user=user, prefix_groups={user or name: group} if group else {}),
    names,
    st.just("") | names,
    st.just("") | names,
)


@given(callers, st.text('ab:,"[]', max_size=3), callers, st.text('ab:,"[]', max_size=3))
def test_salts_depend_on_account_group_and_client(one: Caller, given_one: str, other: Caller, given_other: str) -> None:
    """Two requests have equal salts only if account (or prefix group) and the client's own salt are equal."""

    def owner(who: Caller) -> tuple[bool, str]:
        group = who.prefix_groups.get(who.account)
        return (False, who.account) if group is None else (True, group)

    same = (owner(one), given_one) == (owner(other), given_other)
    assert (one.cache_salt(given_one) == other.cache_salt(given_other)) == same
