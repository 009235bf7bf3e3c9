"""Tests that pods can be replaced, killed and scaled while clients send requests, as docs/kubernetes.md promises.

Processes stand for pods, with the command lines of the manifests. No request may be refused, and all tokens must equal
those of an undisturbed target. Times are printed, not asserted.
"""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port
from tests.deploy.kustomize import KUBERNETES, manifests, with_components
from tests.deploy.pods import Site, addresses, running, service
from tests.support.certificates import pki
from tests.support.clients import Load
from tests.support.cluster import Member
from tests.support.servers import run_command

NUM_CLIENTS = 4
SLOW = ("--emulate=target:30ms",)
"""Flags that slow each pass of a target to 30 ms, so that an answer takes seconds on any machine."""
PAUSE_S = 5.0
"""Seconds between the replacements of two replicas; the manifests leave more, by `minReadySeconds`."""

Work = Coroutine[Any, Any, None]


@pytest.fixture
def site(tmp_path: Path, access: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(ROOT)
    return Site(tmp_path, access)


@dataclass(frozen=True)
class Demo:
    """Processes for the pods of the overlay cpu-demo, and clients that compare answers with the target's own."""

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
        load = await site.learn(targets[0])
        async with running(*drafts, *gateways):
            yield Demo(targets, drafts, gateways, load)


async def roll(members: Sequence[Member]) -> None:
    """End and start pods one after the other, with PAUSE_S seconds between; each keeps its ports."""
    for member in members:
        await member.end()
        await member.start()
        await asyncio.sleep(PAUSE_S)


async def lose_a_node(demo: Demo) -> None:
    """Kill a target, a draft worker and a gateway at once, as a failed node would; start them again after a pause."""
    node = [demo.targets[0], demo.drafts[0], demo.gateways[0]]
    await asyncio.sleep(PAUSE_S)
    for member in node:
        member.send(signal.SIGKILL)
    await asyncio.sleep(PAUSE_S)
    await asyncio.gather(*(member.restart() for member in node))
    await asyncio.sleep(PAUSE_S)


async def scale_drafts(demo: Demo) -> None:
    """End both draft workers of the demo, and start them again after a pause."""
    for draft in demo.drafts:
        await draft.end()
    await asyncio.sleep(PAUSE_S)
    for draft in demo.drafts:
        await draft.start()
    await asyncio.sleep(PAUSE_S)


Bar = Callable[[str, Site, Sequence[Member], Load, Work], Coroutine[Any, Any, None]]


@pytest.fixture
def bar(capsys: pytest.CaptureFixture[str]) -> Bar:
    """Return a function that runs a disturbance while clients send requests, and prints counts of their answers.

    Its arguments are the disturbance's name, the site, the pods that clients ask, the clients, and the disturbance. It
    fails if a request is refused or answered wrongly, or loses its connection although the name has no word "killed".
    """

    async def under_load(what: str, site: Site, fronts: Sequence[Member], load: Load, work: Work) -> None:
        async with service(fronts) as port, site.client(port) as client:
            await load.during(client, NUM_CLIENTS, work)
        with capsys.disabled():
            counts = f"{load.num_same} | {len(load.refused)} | {load.num_cut} | {len(load.other)}"
            print(f"\n| {what} | {counts} | {load.longest_gap_s:.1f} s |")
        assert (load.refused, load.other) == ([], [])
        assert load.num_same >= NUM_CLIENTS
        assert load.num_cut <= (NUM_CLIENTS if "killed" in what else 0)

    return under_load


def metric(name: str, labels: str, text: str) -> float:
    [value] = re.findall(rf"^{name}{{.*{labels}.*}} (.*)$", text, re.MULTILINE)
    return float(value)


async def scrape(pod: Member, token: str = "") -> httpx.Response:
    """Ask a pod for its metrics over plain HTTP, as Prometheus does; return the response."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pod.metrics_port}", timeout=5) as prometheus:
        return await prometheus.get("/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})


@pytest.mark.deploy
async def test_it_answers_with_the_help_of_its_draft(site: Site) -> None:
    """The demo answers with accepted draft tokens; a draft pod is ready once its target has accepted it.

    Regression: draft pods had no port for probes, so a rollout succeeded although every target refused the new drafts.
    """
    target = site.pod("target", {}, "--no-lookup", "--drafting", "always")
    draft = site.pod("draft", {"--attach": target.address})
    gateway = site.pod("gateway", {"--target_host": target.address})
    body = {"prompt": "1, 2, 3, 4,", "max_tokens": 48, "temperature": 0}
    async with running(target), running(draft, gateway):
        assert await target.is_ready()
        assert await gateway.is_ready()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:  # without a token
            answer = (await client.post("/v1/completions", json=body)).json()
        assert await draft.is_ready()
        at_target, at_draft = [(await scrape(pod, site.token("ops"))).text for pod in (target, draft)]
        assert metric("specdec_draft_tokens_total", 'accepted="true",.*source="draft"', at_draft) > 0
        assert metric("specdec_account_tokens_total", 'account="gateway"', at_target) > 0
        server = f'server="127.0.0.1:{target.port}"'
        assert metric("specdec_upstream_tokens_total", server, (await scrape(gateway)).text) == 48
        assert (await scrape(draft)).status_code == 401
        target.send(signal.SIGKILL)
        async with asyncio.timeout(60):
            while await draft.is_ready():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)
        assert draft.is_alive, "not ready"
    assert answer["choices"][0]["text"].startswith(" 5, 6, 7")
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


@pytest.mark.deploy
async def test_nothing_is_refused_while_a_target_drains(site: Site, bar: Bar) -> None:
    """No request is refused while a target shuts down and lets its requests end.

    Regression: gateways connected to the single address of a Service, and a rolling restart refused 47 of 61 requests.
    """
    targets = [site.pod("target", {"--drain_delay_s": "0"}, "--no-lookup", *SLOW) for _ in range(2)]
    gateway = site.pod("gateway", {"--target_host": addresses(targets)})
    async with running(*targets), running(gateway):
        load = await site.learn(targets[1])
        await bar("drain of a target", site, [gateway], load, targets[0].end())


DISTURBANCES: dict[str, Callable[[Demo], Work]] = {
    "rolling restart of targets": lambda demo: roll(demo.targets),
    "rolling restart of gateways": lambda demo: roll(demo.gateways),
    "rolling restart of drafts": lambda demo: roll(demo.drafts),
    "a node's loss: target, draft and gateway killed": lose_a_node,
    "pool workers scaled from 2 to 0 and to 2": scale_drafts,
}


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", DISTURBANCES)
async def test_a_disturbed_demo_refuses_nothing(what: str, site: Site, bar: Bar) -> None:
    """No request is refused, and no connection lost, while pods are replaced, killed or scaled.

    Only clients of a gateway that was killed lose their connection, and ask the other gateway once.
    """
    async with cpu_demo(site) as demo:
        await bar(what, site, demo.gateways, demo.load, DISTURBANCES[what](demo))


def serving_draft(site: Site, targets: str) -> Member:
    port = free_port()
    flags = ("--target_host", targets, "--serve", str(port), "--token_file", str(site.access / "edge"))
    return Member(f"draft-{port}", "draft", (*flags, "--threads", "1"), site.folder, port=port)


@pytest.mark.release
@pytest.mark.timeout(600)
async def test_serving_drafts_are_restarted_one_by_one(site: Site, bar: Bar) -> None:
    """No request is refused while draft servers that gateways connect to are replaced one after the other.

    They are set up as in docs/failover.md; no manifest has them.
    """
    grant = ("--auth_file", site.access / "auth.toml", "--name", "edge", "--grant", "client", "--speaks_for_others")
    (site.access / "edge").write_text((await run_command("--role", "token", *grant)).stdout)
    targets = [site.pod("target", {}, *SLOW) for _ in range(2)]
    drafts = [serving_draft(site, addresses(targets)) for _ in range(2)]
    gateway = site.pod("gateway", {"--target_host": addresses(drafts)})
    async with running(*targets):
        load = await site.learn(targets[0])
        async with running(*drafts, gateway):
            await bar("rolling restart of serving drafts", site, [gateway], load, roll(drafts))


@pytest.mark.release
@pytest.mark.timeout(600)
async def test_fused_servers_are_restarted_one_by_one(site: Site, bar: Bar) -> None:
    """No request is refused while servers with draft and target in one process are replaced one after the other.

    Clients call them without a gateway; a server that shuts down finishes its requests first.
    """
    small = {"--target_model": "models/target", "--draft_model": "models/draft", "--sequence_length": "2048"}
    gpu = Site(site.folder, site.access, documents=manifests(KUBERNETES / "overlays" / "gpu"))
    fused = [gpu.pod("target", {**small, "--device": "cpu"}, "--threads=1", *SLOW) for _ in range(2)]
    alone = site.pod("target", {}, *SLOW)
    async with running(alone):
        load = await site.learn(alone)
    async with running(*fused):
        await bar("rolling restart of fused servers", site, fused, load, roll(fused))


async def shown(port: int) -> str:
    """Open a new TLS connection to this port; return the server's certificate (PEM)."""
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=60)


@pytest.mark.release
@pytest.mark.timeout(600)
async def test_certificates_are_renewed(tmp_path: Path, site: Site, bar: Bar) -> None:
    """No request is refused while the certificates of targets and gateways are renewed, as cert-manager does.

    Connections that are open at the time continue.
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
        after = [await shown(port) for port in ports]
        assert all(new != old for new, old in zip(after, before, strict=True))
