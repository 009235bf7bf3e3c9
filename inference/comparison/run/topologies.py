"""Starts the servers of every topology, pinned to their machines, and the network between them.

The target alone and the target of the distributed topology are one process: its engine does for a client what it does
for a draft worker, on the same cores. The pool has a target of its own, so that its workers help nobody else. Servers
that are not being measured wait for requests and burn nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from inference.comparison.plan.backend import NGRAM, Server, server_flags
from inference.comparison.plan.config import ClientSite, ComparisonConfig, Contender, NetworkConfig, Topology
from inference.comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy
from inference.comparison.run.watch import ServerWatch, all_or_none
from inference.config import model_name
from inference.serving.processes import ServerProcess, finished_process, free_port, server_process

SERVER_GRACE_S = 1.0
"""Given to running requests when a server is stopped: by then nobody waits for them."""

ATTACHED = "attached as"
"""What a worker of the pool logs when its target has taken it in."""

_Service = tuple[Topology, str | None, int | None]  # what clients tell apart: topology, draft, branches

SHARED_TARGET = Server("target")


class Deployment:
    """Running servers, and the links to them.

    Args:
        config: what runs where.
        watch: knows when one dies.
    """

    def __init__(self, config: ComparisonConfig, watch: ServerWatch) -> None:
        self._config = config
        self.watch = watch
        self._client_links: dict[_Service, DelayProxy] = {}
        self._draft_links: dict[Server, DelayProxy] = {}  # by target
        self.servers: list[ServerProcess] = []

    def address(self, contender: Contender) -> str:
        """Where a thin client reaches it: through its link."""
        draft, branches = contender.draft, contender.branches
        if contender.topology is Topology.DISTRIBUTED and branches is None:  # rounds: any worker will do
            branches = self._config.branches[0]
        if contender.topology is Topology.TARGET:  # one target for all; whether it looks up, requests say
            draft = None
        return self._client_links[contender.topology, draft, branches].address

    def set_rtt(self, rtt_ms: float) -> None:
        """Change the network between edge and target; links within a site stay as fast as they are."""
        network = self._config.network
        far, near = link_conditions(network, rtt_ms), LinkConditions()
        for link in self._draft_links.values():
            link.conditions = far
        for (topology, *_), link in self._client_links.items():
            link.conditions = far if crosses_network(topology, network.client_site) else near

    async def start(self, stack: AsyncExitStack) -> None:
        """Start, all at once, what the topologies need; `stack` stops it.

        Raises:
            UnavailableError: a server ended or did not serve in time.
        """
        ports = await self._link(stack)
        await self.watch.guard(all_or_none([self._start(stack, server, port) for server, port in ports.items()]))

    async def compile(self, stack: AsyncExitStack) -> None:
        """Let every server compile what it will load, and end: one after another, since compilers take much memory.

        Raises:
            UnavailableError: one failed; the message has the end of its log.
        """
        for server, port in (await self._link(stack)).items():
            flags = self._flags(server, port)
            if self._config.backend.compile_flag in flags:
                await finished_process(self._name(server), server.role, *flags)

    async def _link(self, stack: AsyncExitStack) -> dict[Server, int]:
        """A port for every server, and a link to every target."""
        ports = {server: free_port() for server in self._config.servers}
        for server, port in ports.items():
            if server.role == "target":
                self._draft_links[server] = await stack.enter_async_context(delay_proxy(port))
        return ports

    def terminate(self) -> None:
        """Ask all servers at once to end: one after another would take seconds each."""
        for server in self.servers:
            if server.process.returncode is None:
                server.process.terminate()

    async def _start(self, stack: AsyncExitStack, server: Server, port: int) -> None:
        config, attaches = self._config, _attaches(server)
        process = await stack.enter_async_context(
            server_process(
                self._name(server),
                server.role,
                *self._flags(server, port),
                port=port,
                cores=self._cores(server),
                ready_timeout_s=config.backend.start_timeout_s,
                ready_line=ATTACHED if attaches else None,
            )
        )
        self.watch.add(process)
        self.servers.append(process)
        if not attaches:
            self._client_links[_service(server)] = await stack.enter_async_context(delay_proxy(port))

    def _cores(self, server: Server) -> tuple[int, ...]:
        return self._config.machines[int(server.role == "draft")].cores

    def _flags(self, server: Server, port: int) -> list[str]:
        config = self._config
        flags = [*self._role_flags(server, port), *server_flags(config.backend, server, config.servers, config.gammas)]
        flags += ["--threads", str(len(self._cores(server))), "--batch", str(config.workload.max_concurrency)]
        flags += ["--no-prefix_caching"]  # prompts come again, and reading them is a part of what is compared
        return flags + ([] if _attaches(server) else ["--grace_s", str(SERVER_GRACE_S)])

    def _role_flags(self, server: Server, port: int) -> list[str]:
        """What main.py must be told, beside what computes and where."""
        target, draft = str(self._config.target_model), server.draft or ""
        gamma = ["--gamma", str(self._config.gammas[0])]
        if server.role == "target":
            return ["--model", target, "--port", str(port)]
        if server.role == "fused_target":
            is_sweep = len(self._config.gammas) > 1  # over lengths, not limits
            fixed = ["--no-adaptive_gamma"] if is_sweep else []
            return ["--target_model", target, "--draft_model", draft, "--port", str(port), *gamma, *fixed]
        flags = ["--model", draft, *gamma, "--branches", str(server.branches)]
        flags += ["--tokenizer", target] if draft == NGRAM else []
        if server.pooled:
            link = self._draft_links[replace(server, role="target")]
            return [*flags, "--attach", link.address]
        link = self._draft_links[SHARED_TARGET]
        flags += ["--serve", str(port), "--target_host", "127.0.0.1", "--port", str(link.port)]
        # The target starts at the same time.
        return [*flags, "--connect_timeout_s", str(self._config.backend.start_timeout_s)]

    def _name(self, server: Server) -> str:
        """Names a server in messages; where there are several of a kind, says which."""
        role = server.role.removesuffix("_target")
        parts = ["pool", role] if server.pooled else [role]
        if server.draft is not None and len(self._config.draft_models) > 1:
            parts.append(model_name(Path(server.draft)))
        if server.branches is not None and len(self._config.branches) > 1:
            parts.append(str(server.branches))
        return "-".join(parts)


def _attaches(server: Server) -> bool:
    return server.role == "draft" and server.pooled


def _service(server: Server) -> _Service:
    """What a server does for clients."""
    topologies = {"target": Topology.TARGET, "fused_target": Topology.FUSED, "draft": Topology.DISTRIBUTED}
    topology = Topology.POOL if server.pooled else topologies[server.role]
    return topology, server.draft, server.branches


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
    server_site = ClientSite.EDGE if topology.serves_at_edge else ClientSite.TARGET
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


async def compile_models(config: ComparisonConfig) -> None:
    """Compile what the servers of a comparison will load."""
    async with AsyncExitStack() as stack:
        await Deployment(config, ServerWatch()).compile(stack)
