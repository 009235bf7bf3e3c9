"""The command lines of the overlay cpu-demo, run as processes of this machine; only addresses and paths differ."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port
from tests.deploy.consistency import arguments_of
from tests.deploy.kustomize import KUBERNETES, Manifest, manifests, of_kind
from tests.deploy.test_scripts import KUBECTL, stand_in
from tests.support.clients import Load, ask_http, questions
from tests.support.cluster import Member

pytestmark = pytest.mark.deploy


def flags_of(name: str, replaced: Mapping[str, str], documents: Sequence[Manifest] = ()) -> list[str]:
    """Return role and flags of a workload, after replacing values of flags and folders of Secrets.

    Args:
        documents: manifests; if empty, those of cpu-demo.
    """
    documents = list(documents) or manifests(KUBERNETES / "overlays" / "cpu-demo")
    workloads = {each["metadata"]["name"]: each for each in of_kind(documents, "StatefulSet", "Deployment")}
    flags = {flag: replaced.get(flag, value) for flag, value in arguments_of(workloads[name], documents).items()}
    for folder in ("/access", "/tls"):
        here = replaced.get(folder, folder)
        flags = {flag: value.replace(f"{folder}/", f"{here}/") for flag, value in flags.items()}
    role = flags.pop("--role")
    return [role, *(f"{flag}={value}" if value else flag for flag, value in flags.items())]


@pytest.fixture
def access(tmp_path: Path) -> str:
    """Make the Secret of tokens as access.sh does; return its folder on this machine."""
    (kept := tmp_path / "kept").mkdir()
    environment = stand_in(tmp_path, "kubectl", KUBECTL) | {"KEPT": str(kept)}
    subprocess.run([KUBERNETES / "access.sh", "cpu-demo"], check=True, env=environment, stdin=subprocess.DEVNULL)
    return str(kept)


def member_of(
    name: str, folder: Path, replaced: Mapping[str, str], *more: str, documents: Sequence[Manifest] = ()
) -> Member:
    """Return a pod of a workload, not started, on free ports; see `flags_of`."""
    own = ("--http_port", "--probe_port", "--metrics_port", "--serve", *(["--port"] if name == "target" else []))
    ports = {flag: free_port() for flag in own}
    role, *flags = flags_of(name, {**{flag: str(port) for flag, port in ports.items()}, **replaced}, documents)
    return Member(
        f"{name}-{ports['--probe_port']}",
        role,
        (*flags, *more),
        folder,
        port=ports.get("--port", 0),
        http_port=ports["--http_port"],
        metrics_port=ports["--metrics_port" if name == "draft" else "--http_port"],
        probe_port=ports["--probe_port"],
        ready_line={"target": "serving on", "draft": "attached as", "gateway": "HTTP on http"}[name],
    )


@asynccontextmanager
async def pod_of(name: str, access: str, given: Mapping[str, str], *more: str) -> AsyncGenerator[Member]:
    """Run a pod of a workload with the flags' values in `given` until the block ends."""
    one = member_of(name, Path(access), {"/access": access, "--drain_delay_s": "0", **given}, *more)
    try:
        await one.start()
        yield one
    finally:
        await one.stop()


async def scrape(pod: Member, token: str = "") -> httpx.Response:
    """Return a pod's metrics, asked for as Prometheus does."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pod.metrics_port}", timeout=5) as prometheus:
        return await prometheus.get("/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})


class Service:
    """One address of several pods, as kube-proxy makes it: each new connection goes to the next pod that is ready."""

    def __init__(self, pods: Sequence[Member], *, grpc: bool = False) -> None:
        self._pods = pods
        self._grpc = grpc

    async def __aenter__(self) -> int:
        """Listen; return the port."""
        self._listening = await asyncio.start_server(self._lead, "127.0.0.1", 0)
        return int(self._listening.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._pods = [*self._pods[1:], self._pods[0]]
        with suppress(OSError):
            for pod in self._pods:
                if await pod.is_ready():
                    there = await asyncio.open_connection("127.0.0.1", pod.port if self._grpc else pod.http_port)
                    await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))
                    return
        writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def dialled(targets: Sequence[Member], stack: AsyncExitStack) -> dict[str, str]:
    """Return the gateway's flags with addresses of this machine.

    These are the targets' if the manifest names replicas, else that of a Service.
    """
    host = next(flag for flag in flags_of("gateway", {"/access": ""}) if flag.startswith("--target_host"))
    if numbers := [int(number) for number in re.findall(r"target-(\d+)\.targets:50051", host)]:
        return {"--target_host": ",".join(f"127.0.0.1:{targets[i].port}" for i in numbers if i < len(targets))}
    port = await stack.enter_async_context(Service(targets, grpc=True))
    return {"--target_host": "127.0.0.1", "--port": str(port)}


def body(prompt: str, num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **more}


def accepted_by(metrics: str) -> float:
    """Return how many draft tokens a target has accepted of a draft model, by the target's metrics."""
    [value] = re.findall(r'^specdec_draft_tokens_total{accepted="true",.*source="draft"} (.*)$', metrics, re.MULTILINE)
    return float(value)


async def test_it_answers_with_the_help_of_its_draft(access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo answers, its target accepts draft tokens, and a draft pod is ready only once a target has taken it.

    It was once otherwise: draft pods had no port for probes, so a rollout of drafts that every target refused
    succeeded.
    """
    monkeypatch.chdir(ROOT)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(pod_of("target", access, {}, "--no-lookup"))
        draft = await stack.enter_async_context(pod_of("draft", access, {"--attach": f"127.0.0.1:{target.port}"}))
        gateway = await stack.enter_async_context(pod_of("gateway", access, await dialled([target], stack)))
        assert await target.is_ready()
        assert await gateway.is_ready()
        url = f"http://127.0.0.1:{gateway.http_port}/v1/completions"
        answer = (await asyncio.to_thread(httpx.post, url, json=body("1, 2, 3, 4,", 48), timeout=60)).json()
        assert await draft.is_ready()
        ops = (Path(access) / "ops").read_text().strip()
        assert accepted_by((await scrape(draft, ops)).text) > 0
        assert re.search(
            r'^specdec_account_tokens_total{account="gateway",.*} [1-9]', (await scrape(target, ops)).text, re.M
        )
        server = f'server="127.0.0.1:{target.port}"'
        assert re.search(rf"^specdec_upstream_tokens_total{{.*{server}}} 48.0$", (await scrape(gateway)).text, re.M)
        assert (await scrape(draft)).status_code == 401
        target.send(signal.SIGKILL)
        async with asyncio.timeout(60):
            while await draft.is_ready():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)
        assert draft.is_alive, "not ready"
    assert answer["choices"][0]["text"].startswith(" 5, 6, 7")
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_nothing_is_refused_while_a_target_drains(access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is refused while a target drains.

    It was once otherwise: gateways dialled a Service's one address, and a rolling restart refused 47 of 61 requests.
    """
    monkeypatch.chdir(ROOT)
    token = (Path(access) / "gateway").read_text().strip()
    async with AsyncExitStack() as stack:
        slow = ("--no-lookup", "--emulate=target:30ms")
        starting = (stack.enter_async_context(pod_of("target", access, {}, *slow)) for _ in range(2))
        targets = await asyncio.gather(*starting)
        gateway = await stack.enter_async_context(pod_of("gateway", access, await dialled(targets, stack)))
        port = await stack.enter_async_context(Service([gateway]))
        alone, client = (
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{each}",
                timeout=60,
                headers={"Authorization": f"Bearer {token}"},
                limits=httpx.Limits(max_keepalive_connections=0),
            )
            for each in (targets[1].http_port, port)
        )
        await stack.enter_async_context(alone)
        await stack.enter_async_context(client)
        asked = questions(4, [150])
        load = Load(dict(zip(asked, await asyncio.gather(*(ask_http(alone, each) for each in asked)), strict=True)))
        await load.during(client, 4, targets[0].end())
    assert (load.refused, load.other, load.num_cut) == ([], [], 0)
    assert load.num_same >= 4
