"""Processes on this machine with the command lines of pods in manifests; only addresses, paths and models differ."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from specdec.inference.serving.processes import free_port
from tests.deploy.consistency import arguments_of
from tests.deploy.kustomize import KUBERNETES, Manifest, manifests, of_kind
from tests.support.certificates import Pki
from tests.support.clients import Load, ask_http, questions
from tests.support.cluster import Member


@dataclass(frozen=True)
class Site:
    """The manifests of pods to imitate, and the files on this machine that replace those mounted into the pods.

    Attributes:
        folder: folder for certificates and logs.
        access: folder of the access tokens.
        trust: CA that issues the servers' certificates; None for servers without TLS.
        documents: manifests; if empty, those of the overlay cpu-demo.
    """

    folder: Path
    access: Path
    trust: Pki | None = None
    documents: Sequence[Manifest] = ()

    def pod(self, name: str, replaced: Mapping[str, str], *more: str) -> Member:
        """Return a process for a workload of the manifests, on free ports; it is not started yet.

        `replaced` has other values for some of its flags; `more` are further flags.
        """
        own = ("--http_port", "--probe_port", "--metrics_port", "--serve", *(["--port"] if name == "target" else []))
        ports = {flag: free_port() for flag in own}
        role, *flags = self._flags(name, {**{flag: str(port) for flag, port in ports.items()}, **replaced})
        return Member(
            f"{name}-{ports['--probe_port']}",
            role,
            (*flags, *more),
            self.folder,
            port=ports.get("--port", 0),
            http_port=ports["--http_port"],
            metrics_port=ports["--metrics_port" if name == "draft" else "--http_port"],
            probe_port=ports["--probe_port"],
            ready_line={"target": "serving on", "draft": "attached as", "gateway": "HTTP on http"}[name],
        )

    def _flags(self, name: str, replaced: Mapping[str, str]) -> list[str]:
        """Return a workload's role, then its flags, with folders of this machine in place of mounted Secrets."""
        documents = list(self.documents) or manifests(KUBERNETES / "overlays" / "cpu-demo")
        workloads = {each["metadata"]["name"]: each for each in of_kind(documents, "StatefulSet", "Deployment")}
        flags = {flag: replaced.get(flag, value) for flag, value in arguments_of(workloads[name], documents).items()}
        for there, here in (("/access/", f"{self.access}/"), ("/tls/", f"{self.folder / name}/")):
            flags = {flag: value.replace(there, here) for flag, value in flags.items()}
        role = flags.pop("--role")
        return [role, *(f"{flag}={value}" if value else flag for flag, value in flags.items())]

    def token(self, name: str) -> str:
        return (self.access / name).read_text().strip()

    def client(self, port: int) -> httpx.AsyncClient:
        """Return an HTTP client for a port, with the gateway's access token; each request has a new connection."""
        verify = True if self.trust is None else ssl.create_default_context(cafile=self.trust.ca)
        return httpx.AsyncClient(
            base_url=f"{'http' if self.trust is None else 'https'}://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {self.token('gateway')}"},
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=120,
            verify=verify,
        )

    def issue(self, name: str) -> None:
        """Write new certificates to the folder that replaces a workload's Secret, as cert-manager renews them."""
        assert self.trust is not None
        issued = self.trust.authority.issue(["target", "api", "localhost", "127.0.0.1"])
        (secret := self.folder / name).mkdir(exist_ok=True)
        files = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": self.trust.authority.pem}
        for file, content in files.items():
            (secret / file).write_bytes(content)

    async def learn(self, target: Member) -> Load:
        """Ask a target some questions; return clients that will ask the same, and compare the answers with these."""
        asked = questions(6, [100])
        async with self.client(target.http_port) as client:
            answers = await asyncio.gather(*(ask_http(client, question) for question in asked))
        assert [answer.words for answer in answers if answer.fault] == []
        return Load(dict(zip(asked, answers, strict=True)))


def addresses(members: Sequence[Member]) -> str:
    return ",".join(member.address for member in members)


@asynccontextmanager
async def running(*members: Member) -> AsyncGenerator[None]:
    """Start these processes, and yield once all are ready; end them when the block ends."""
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


@asynccontextmanager
async def service(pods: Sequence[Member]) -> AsyncGenerator[int]:
    """Yield a port that stands for a Kubernetes Service of several pods.

    Each new connection goes to the next pod that is ready, like with kube-proxy.
    """
    order = list(pods)

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order.append(order.pop(0))
        with suppress(OSError):
            for pod in list(order):
                if await pod.is_ready():
                    there = await asyncio.open_connection("127.0.0.1", pod.http_port)
                    await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))
                    return
        writer.close()

    listening = await asyncio.start_server(lead, "127.0.0.1", 0)
    try:
        yield int(listening.sockets[0].getsockname()[1])
    finally:
        listening.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
