"""Pods are replaced, killed and scaled while clients ask, as docs/kubernetes.md promises; processes stand for pods.

The command lines are the manifests', but for addresses, paths and, on GPUs, models. A test asserts that no request is
refused and that tokens equal undisturbed ones. Times are printed, not asserted.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.inference.serving.processes import free_port
from tests.deploy.kustomize import KUBERNETES, Manifest, manifests, with_components
from tests.deploy.test_cpu_demo import Service, access, member_of  # noqa: F401
from tests.support.certificates import Pki, pki
from tests.support.clients import Load, ask_http, questions
from tests.support.cluster import Member
from tests.support.servers import run_command

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]

NUM_CLIENTS = 4
QUESTIONS = questions(6, [100])
SLOW = ("--emulate=target:30ms",)
"""Flags with which an answer is under way for seconds, on any machine."""
PAUSE_S = 5.0
"""Time between two replicas; the manifests leave more, `minReadySeconds`."""

Work = Coroutine[Any, Any, None]


@dataclass(frozen=True)
class Site:
    """Files on this machine in place of those that the manifests mount into pods.

    Attributes:
        access: folder of the tokens.
        trust: CA of the certificates; None for plain text.
        documents: manifests; if empty, those of cpu-demo.
    """

    folder: Path
    access: Path
    trust: Pki | None = None
    documents: Sequence[Manifest] = ()

    def pod(self, name: str, replaced: dict[str, str], *more: str) -> Member:
        files = {"/access": str(self.access), "/tls": str(self.folder / name)}
        return member_of(name, self.folder, {**files, **replaced}, *more, documents=self.documents)

    def client(self, port: int) -> httpx.AsyncClient:
        """Return a client that connects for each request."""
        verify = True if self.trust is None else ssl.create_default_context(cafile=self.trust.ca)
        token = (self.access / "gateway").read_text().strip()
        return httpx.AsyncClient(
            base_url=f"{'http' if self.trust is None else 'https'}://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {token}"},
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=120,
            verify=verify,
        )

    def issue(self, name: str) -> None:
        """Write new certificates into the files of a Secret, as cert-manager does."""
        assert self.trust is not None
        issued = self.trust.authority.issue(["target", "api", "localhost", "127.0.0.1"])
        (secret := self.folder / name).mkdir(exist_ok=True)
        files = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": self.trust.authority.pem}
        for file, content in files.items():
            (secret / file).write_bytes(content)


@pytest.fixture
def site(tmp_path: Path, access: str, monkeypatch: pytest.MonkeyPatch) -> Site:  # noqa: F811
    monkeypatch.chdir(KUBERNETES.parents[1])
    return Site(tmp_path, Path(access))


def addresses(members: Sequence[Member]) -> str:
    return ",".join(member.address for member in members)


@asynccontextmanager
async def running(*members: Member) -> AsyncGenerator[None]:
    """Run pods until the block ends."""
    async with AsyncExitStack() as stack:
        for member in members:
            stack.push_async_callback(member.stop)
        try:
            await asyncio.gather(*(member.start() for member in members))
            yield
        finally:
            for member in members:
                if member.is_alive:
                    member.send(signal.SIGKILL)


async def learn(site: Site, target: Member) -> Load:
    """Return a load of requests with the answers that the target alone gives to them."""
    async with site.client(target.http_port) as client:
        answers = await asyncio.gather(*(ask_http(client, question) for question in QUESTIONS))
    assert [answer.words for answer in answers if answer.fault] == []
    return Load(dict(zip(QUESTIONS, answers, strict=True)))


@dataclass(frozen=True)
class Demo:
    """The pods of the overlay cpu-demo, and clients that compare each answer with the target's own."""

    targets: list[Member]
    drafts: list[Member]
    gateways: list[Member]
    load: Load


@asynccontextmanager
async def cpu_demo(site: Site) -> AsyncGenerator[Demo]:
    targets = [site.pod("target", {}, *SLOW) for _ in range(2)]
    where = addresses(targets)
    drafts = [site.pod("draft", {"--attach": where}) for _ in range(2)]
    gateways = [site.pod("gateway", {"--target_host": where}) for _ in range(2)]
    async with running(*targets):
        load = await learn(site, targets[0])
        async with running(*drafts, *gateways):
            yield Demo(targets, drafts, gateways, load)


async def roll(members: Sequence[Member]) -> None:
    """Replace pods one after the other; each new one gets the ports of the old one."""
    for member in members:
        await member.end()
        await member.start()
        await asyncio.sleep(PAUSE_S)


Bar = Callable[[str, Site, Sequence[Member], Load, Work], Coroutine[Any, Any, None]]


@pytest.fixture
def bar(capsys: pytest.CaptureFixture[str]) -> Bar:
    """Return a function that works while clients ask, checks that no request is refused, and prints its figures."""

    async def under_load(what: str, site: Site, fronts: Sequence[Member], load: Load, work: Work) -> None:
        async with AsyncExitStack() as stack:
            port = await stack.enter_async_context(Service(fronts))
            client = await stack.enter_async_context(site.client(port))
            await load.during(client, NUM_CLIENTS, work)
        with capsys.disabled():
            counts = f"{load.num_same} | {len(load.refused)} | {load.num_cut} | {len(load.other)}"
            print(f"\n| {what} | {counts} | {load.longest_gap_s:.1f} s |")
        assert load.refused == []
        assert load.other == []
        assert load.num_same > NUM_CLIENTS

    return under_load


@pytest.mark.parametrize("role", ["targets", "gateways", "drafts"])
async def test_a_role_is_restarted_pod_by_pod(role: str, site: Site, bar: Bar) -> None:
    """No request is refused while pods of one role are replaced: targets, gateways, or draft workers of the pool."""
    async with cpu_demo(site) as demo:
        await bar(f"rolling restart of {role}", site, demo.gateways, demo.load, roll(getattr(demo, role)))
        assert demo.load.num_cut == 0


def serving_draft(site: Site, targets: str) -> Member:
    port = free_port()
    flags = ("--target_host", targets, "--serve", str(port), "--token_file", str(site.access / "edge"))
    return Member(f"draft-{port}", "draft", (*flags, "--threads", "1"), site.folder, port=port)


async def test_serving_drafts_are_restarted_one_by_one(site: Site, bar: Bar) -> None:
    """No request is refused while draft workers that gateways dial are replaced.

    They are set up as in docs/failover.md; no manifest has them.
    """
    grant = ("--auth_file", site.access / "auth.toml", "--name", "edge", "--grant", "client", "--speaks_for_others")
    (site.access / "edge").write_text((await run_command("--role", "token", *grant)).stdout)
    targets = [site.pod("target", {}, *SLOW) for _ in range(2)]
    drafts = [serving_draft(site, addresses(targets)) for _ in range(2)]
    gateway = site.pod("gateway", {"--target_host": addresses(drafts)})
    async with running(*targets):
        load = await learn(site, targets[0])
        async with running(*drafts, gateway):
            await bar("rolling restart of serving drafts", site, [gateway], load, roll(drafts))
    assert load.num_cut == 0


async def test_fused_servers_are_restarted_one_by_one(site: Site, bar: Bar) -> None:
    """No request is refused while fused servers are replaced.

    Clients call them without a gateway, and a draining server finishes its requests within its grace.
    """
    small = {"--target_model": "models/target", "--draft_model": "models/draft", "--sequence_length": "2048"}
    gpu = Site(site.folder, site.access, documents=manifests(KUBERNETES / "overlays" / "gpu"))
    fused = [gpu.pod("target", {**small, "--device": "cpu"}, "--threads=1", *SLOW) for _ in range(2)]
    alone = site.pod("target", {}, *SLOW)
    async with running(alone):
        load = await learn(site, alone)
    async with running(*fused):
        await bar("rolling restart of fused servers", site, fused, load, roll(fused))
    assert load.num_cut == 0


async def test_a_node_is_lost_with_all_that_runs_on_it(site: Site, bar: Bar) -> None:
    """No request is refused after a target, a draft worker and a gateway are killed at once.

    Clients of that gateway lose their connection, and ask the other gateway once.
    """
    async with cpu_demo(site) as demo:
        node = [demo.targets[0], demo.drafts[0], demo.gateways[0]]

        async def lose() -> None:
            await asyncio.sleep(PAUSE_S)
            for member in node:
                member.send(signal.SIGKILL)
            await asyncio.sleep(PAUSE_S)
            await asyncio.gather(*(member.restart() for member in node))
            await asyncio.sleep(PAUSE_S)

        await bar("a node's loss: target, draft and gateway killed", site, demo.gateways, demo.load, lose())
        assert demo.load.num_cut <= NUM_CLIENTS


async def test_pool_workers_come_and_go(site: Site, bar: Bar) -> None:
    """No request is refused while the pool is scaled from two draft workers to none, and back to two."""
    async with cpu_demo(site) as demo:

        async def scale() -> None:
            for draft in demo.drafts:
                await draft.end()
            await asyncio.sleep(PAUSE_S)
            for draft in demo.drafts:
                await draft.start()
            await asyncio.sleep(PAUSE_S)

        await bar("pool workers scaled from 2 to 0 and to 2", site, demo.gateways, demo.load, scale())
        assert demo.load.num_cut == 0


async def shown(port: int) -> str:
    """Return the certificate that a server shows to a new connection."""
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=60)


async def test_certificates_are_renewed(tmp_path: Path, site: Site, bar: Bar) -> None:
    """No request is refused while the certificates of targets and gateways are renewed, as by cert-manager.

    Open connections continue.
    """
    (tmp_path / "tls").mkdir()
    documents = with_components(tmp_path / "tls", "overlays/cpu-demo", "components/tls")
    secure = Site(site.folder, site.access, pki(tmp_path / "ca"), documents)
    names = ("target", "gateway", "draft")
    for name in names:
        secure.issue(name)
    async with cpu_demo(secure) as demo:
        ports = [*(target.port for target in demo.targets), *(gateway.http_port for gateway in demo.gateways)]
        before = [await shown(port) for port in ports]

        async def renew() -> None:
            await asyncio.sleep(PAUSE_S)
            for name in names:
                secure.issue(name)
            await asyncio.sleep(PAUSE_S)
            await demo.targets[0].end()  # what runs there goes on over new connections
            await demo.targets[0].start()

        await bar("new certificates for targets and gateways", secure, demo.gateways, demo.load, renew())
        assert demo.load.num_cut == 0
        after = [await shown(port) for port in ports]
        assert all(new != old for new, old in zip(after, before, strict=True))
