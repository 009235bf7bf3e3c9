"""Starts the servers of every topology, pinned to their machines, and the network between them.

The target alone and the target of the distributed topology are one process: its engine does for a client what it does
for a draft worker, on the same cores. Servers that are not being measured wait for requests and burn nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from inference.cli.launch import ServerProcess, free_port, server_process
from inference.comparison.backend import NGRAM, Server, server_flags
from inference.comparison.config import ClientSite, ComparisonConfig, Contender, NetworkConfig, Topology
from inference.comparison.proxy import DelayProxy, LinkConditions, delay_proxy
from inference.comparison.watch import ServerWatch

SERVER_GRACE_S = 1.0
"""Given to running requests when a server is stopped: by then nobody waits for them."""

T = TypeVar("T")


class Deployment:
    """Running servers, and the links to them.

    Args:
        config: what runs where.
        watch: knows when one dies.
    """

    def __init__(self, config: ComparisonConfig, watch: ServerWatch) -> None:
        self._config = config
        self._watch = watch
        self._client_links: dict[tuple[Topology, str | None], DelayProxy] = {}
        self._verification_link: DelayProxy | None = None
        self.servers: list[ServerProcess] = []

    def address(self, contender: Contender) -> str:
        """Where a thin client reaches it: through its link."""
        return self._client_links[contender.topology, contender.draft].address

    def set_rtt(self, rtt_ms: float) -> None:
        """Change the network between edge and target; links within a site stay as fast as they are."""
        network = self._config.network
        far, near = link_conditions(network, rtt_ms), LinkConditions()
        if self._verification_link is not None:
            self._verification_link.conditions = far
        for (topology, _), link in self._client_links.items():
            link.conditions = far if crosses_network(topology, network.client_site) else near

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """See `ServerWatch.guard`."""
        return await self._watch.guard(work)

    async def start(self, stack: AsyncExitStack) -> None:
        """Start, all at once, what the topologies need; `stack` stops it.

        Raises:
            UnavailableError: a server ended or did not serve in time.
        """
        topologies, drafts = self._config.topologies, self._config.draft_models
        starting = []
        if Topology.TARGET in topologies or Topology.DISTRIBUTED in topologies:
            port = free_port()
            self._verification_link = await stack.enter_async_context(delay_proxy(port))
            starting.append(self._start_target(stack, port))
        if Topology.FUSED in topologies:
            starting += [self._start_fused(stack, draft) for draft in drafts]
        if Topology.DISTRIBUTED in topologies:
            starting += [self._start_draft(stack, draft, self._verification_link) for draft in drafts]
        await self.guard(_all(starting))

    def terminate(self) -> None:
        """Ask all servers at once to end: one after another would take seconds each."""
        for server in self.servers:
            if server.process.returncode is None:
                server.process.terminate()

    async def _start_target(self, stack: AsyncExitStack, port: int) -> None:
        flags = ["--model", str(self._config.target_model), "--port", str(port), *self._backend_flags("target")]
        await self._serve(stack, "target", "target", flags, port=port, machine=0)
        await self._link(stack, Topology.TARGET, None, port)

    async def _start_fused(self, stack: AsyncExitStack, draft: str) -> None:
        port = free_port()
        flags = ["--target_model", str(self._config.target_model), "--draft_model", draft, "--port", str(port)]
        flags += [*self._gamma_flags(), *self._backend_flags("fused_target", draft)]
        await self._serve(stack, self._name("fused", draft), "fused_target", flags, port=port, machine=0)
        await self._link(stack, Topology.FUSED, draft, port)

    async def _start_draft(self, stack: AsyncExitStack, draft: str, target: DelayProxy | None) -> None:
        if target is None:
            raise RuntimeError("a draft worker needs a way to its target")
        port = free_port()
        flags = ["--model", draft, "--serve", str(port), "--target_host", "127.0.0.1", "--port", str(target.port)]
        # The target starts at the same time.
        flags += ["--connect_timeout_s", str(self._config.backend.start_timeout_s), *self._gamma_flags()]
        flags += self._backend_flags("draft", draft)
        if draft == NGRAM:
            flags += ["--tokenizer", str(self._config.target_model)]
        await self._serve(stack, self._name("draft", draft), "draft", flags, port=port, machine=1)
        await self._link(stack, Topology.DISTRIBUTED, draft, port)

    def _name(self, what: str, draft: str) -> str:
        """Names a server in messages; with several drafts, says whose it is."""
        if len(self._config.draft_models) == 1:
            return what
        return f"{what}-{Contender(Topology.FUSED, draft, 1).draft_name}"

    def _backend_flags(self, role: str, draft: str | None = None) -> list[str]:
        config = self._config
        return server_flags(config.backend, Server(role, draft), config.servers, config.gammas)

    def _gamma_flags(self) -> list[str]:
        return ["--gamma", str(self._config.gammas[0])]

    async def _serve(
        self, stack: AsyncExitStack, name: str, role: str, flags: list[str], *, port: int, machine: int
    ) -> None:
        cores = self._config.machines[machine].cores
        common = ["--threads", str(len(cores)), "--batch", str(self._config.workload.max_concurrency)]
        common += ["--grace_s", str(SERVER_GRACE_S)]
        timeout_s = self._config.backend.start_timeout_s
        server = await stack.enter_async_context(
            server_process(name, role, *flags, *common, port=port, cores=cores, ready_timeout_s=timeout_s)
        )
        self._watch.add(server)
        self.servers.append(server)

    async def _link(self, stack: AsyncExitStack, topology: Topology, draft: str | None, port: int) -> None:
        self._client_links[topology, draft] = await stack.enter_async_context(delay_proxy(port))


async def _all(starting: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first failure cancels the others."""
    tasks = [asyncio.create_task(one) for one in starting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def link_conditions(network: NetworkConfig, rtt_ms: float) -> LinkConditions:
    """The configured network at one round trip time."""
    bandwidth = network.bandwidth_mbps
    return LinkConditions(
        rtt_s=rtt_ms / 1e3,
        jitter_s=network.jitter_ms / 1e3,
        bytes_per_s=None if bandwidth is None else bandwidth * 1e6 / 8,
    )


def crosses_network(topology: Topology, client_site: ClientSite) -> bool:
    """Whether the thin client's own link has the round trip time: its server stands on the other side."""
    server_site = ClientSite.EDGE if topology is Topology.DISTRIBUTED else ClientSite.TARGET
    return server_site is not client_site


@asynccontextmanager
async def deployment(config: ComparisonConfig) -> AsyncGenerator[Deployment, None]:
    """All servers and links, until the block is left."""
    watch = ServerWatch()
    async with AsyncExitStack() as stack:
        running = Deployment(config, watch)
        try:
            await running.start(stack)
            yield running
        finally:
            watch.stop()
            running.terminate()
