"""Servers of every topology, pinned to their machines, and the network between them.

The target alone and the target of topology distributed are one process: its engine does the same work for a client as
for a draft worker, on the same cores. Each pool has its own target, so that its worker serves no other topology.
Servers that are not being measured wait for requests without using CPU.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from specdec.comparison.plan.backend import SHARED_TARGET, ServerPlan, server_flags, vllm_flags
from specdec.comparison.plan.config import ComparisonConfig, Contender, NetworkConfig
from specdec.comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy
from specdec.inference.config import model_name
from specdec.inference.errors import SpecDecError, UnavailableError
from specdec.inference.serving.models import VLLM
from specdec.inference.serving.processes import ServerProcess, Start, finished_process, free_port, server_process

SERVER_GRACE_S = 1.0
"""Seconds that a server gives running requests when it is stopped; no client waits for them by then."""

GRACE_S = 2.0
"""Seconds to wait, after a failed request, for its server to end; that end is then reported as the cause."""

ATTACHED = "attached as"
"""Text in the log line by which a pool worker reports that it is attached to its target."""


class Deployment:
    """Server processes of a comparison, and the emulated network links to them."""

    def __init__(self, config: ComparisonConfig) -> None:
        self._config = config
        self._ports = {server: free_port() for server in config.servers}
        self._client_links: dict[ServerPlan, DelayProxy] = {}
        self._draft_links: dict[ServerPlan, DelayProxy] = {}  # by target

    def address(self, contender: Contender) -> str:
        """Return HOST:PORT at which clients reach a contender (a way to serve): that of the link to its server."""
        return self._client_links[self._config.server_of(contender)].address

    def set_rtt(self, rtt_ms: float) -> None:
        """Set the round trip time between edge and target, in milliseconds; links within a site have no delay."""
        network = self._config.network
        far, near = _conditions(network, rtt_ms), LinkConditions()
        for link in self._draft_links.values():
            link.conditions = far
        for server, link in self._client_links.items():
            link.conditions = far if network.is_crossed(at_edge=server.role == "draft") else near

    async def link(self, stack: AsyncExitStack) -> None:
        """Open the emulated links to all servers that accept calls; `stack` closes them when it ends."""
        for server, port in self._ports.items():
            if not _attaches(server):
                self._client_links[server] = await stack.enter_async_context(delay_proxy(port))
            if server.role == "target":
                self._draft_links[server] = await stack.enter_async_context(delay_proxy(port))

    async def serve(self, server: ServerPlan, start: Start, is_ready: asyncio.Event) -> None:
        """Run a server until this task is cancelled; set `is_ready` once it is ready.

        Args:
            start: time limit for the start, which all servers of the comparison share.

        Raises:
            UnavailableError: the server ended, or its start made no progress for too long.
        """
        process = server_process(
            self._name(server),
            "target" if self._is_vllm(server) else server.role,
            *self._flags(server),
            port=self._ports[server],
            cores=self._cores(server),
            start=start,
            ready_line=ATTACHED if _attaches(server) else None,
        )
        async with process as running:
            is_ready.set()
            await running.process.wait()
            raise _failure(running)

    async def compile(self) -> None:
        """Compile the models of every server, one after another, since compilers take much memory.

        Raises:
            UnavailableError: a compilation failed; the message has the end of its log.
        """
        for server in self._ports:
            flags = self._flags(server)
            if self._config.backend.compile_flag in flags:
                await finished_process(self._name(server), server.role, *flags)

    def _cores(self, server: ServerPlan) -> tuple[int, ...]:
        return self._config.machines[int(server.role == "draft")].cores

    def _flags(self, server: ServerPlan) -> list[str]:
        config = self._config
        if self._is_vllm(server):
            grace = ["--grace_s", str(SERVER_GRACE_S)]
            return [*self._role_flags(server), *grace, *vllm_flags(config.backend, config.workload.max_concurrency)]
        flags = [*self._role_flags(server), *server_flags(config.backend, server, config.servers, config.gammas)]
        flags += ["--threads", str(len(self._cores(server))), "--batch", str(config.workload.max_concurrency)]
        flags += ["--no-prefix_caching"]  # prompts repeat, and reading them is part of the comparison
        return flags + ([] if _attaches(server) else ["--grace_s", str(SERVER_GRACE_S)])

    def _is_vllm(self, server: ServerPlan) -> bool:
        """Return whether vLLM is the server's engine; its role in main.py is then "target", even with a draft."""
        return server.role in ("target", "fused_target") and self._config.backend.engine == VLLM

    def _role_flags(self, server: ServerPlan) -> list[str]:
        """Return the flags of main.py for a server, except the flags for backend and cores."""
        target, draft, port = str(self._config.target_model), server.draft or "", self._ports[server]
        gamma, drafting = ["--gamma", str(self._config.gammas[0])], ["--drafting", self._config.drafting]
        if server.role == "target":
            return ["--model", target, "--port", str(port), *drafting]
        if server.role == "fused_target" and self._is_vllm(server):
            method = [] if (asked := self._config.backend.method) is None else ["--speculation_method", asked]
            most = ["--gamma", str(max(self._config.gammas))]
            return ["--model", target, "--draft_model", draft, "--port", str(port), *most, *method, *drafting]
        if server.role == "fused_target":
            is_sweep = len(self._config.gammas) > 1  # over lengths, not limits
            fixed = ["--no-adaptive_gamma"] if is_sweep else []
            return ["--target_model", target, "--draft_model", draft, "--port", str(port), *gamma, *fixed, *drafting]
        flags = ["--model", draft, "--tokenizer", target, *gamma, "--branches", str(server.branches)]
        if server.pooled:
            link = self._draft_links[replace(server, role="target", number=0)]
            return [*flags, "--attach", link.address]
        link = self._draft_links[SHARED_TARGET]
        flags += ["--serve", str(port), "--target_host", "127.0.0.1", "--port", str(link.port)]
        # The target starts at the same time.
        return [*flags, "--connect_timeout_s", str(self._config.backend.start_timeout_s)]

    def _name(self, server: ServerPlan) -> str:
        """Return the name of a server for messages, unique among servers of its kind."""
        role = server.role.removesuffix("_target")
        parts = ["pool", role] if server.pooled else [role]
        if server.draft is not None and len(self._config.draft_models) > 1:
            parts.append(model_name(Path(server.draft)))
        if server.branches is not None and len(self._config.branches) > 1:
            parts.append(str(server.branches))
        parts += [f"of{server.workers}"] if server.workers > 1 else []
        parts += [str(server.number + 1)] if server.number else []
        return "-".join(parts)


def _attaches(server: ServerPlan) -> bool:
    return server.role == "draft" and server.pooled


def _conditions(network: NetworkConfig, rtt_ms: float) -> LinkConditions:
    """Return the conditions of the link between edge and target at one round trip time."""
    bandwidth = network.bandwidth_mbps
    return LinkConditions(
        rtt_s=rtt_ms / 1e3,
        jitter_s=network.jitter_ms / 1e3,
        bytes_per_s=None if bandwidth is None else bandwidth * 1e6 / 8,
    )


def _failure(server: ServerProcess) -> UnavailableError:
    code = server.process.returncode or 0
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return UnavailableError(f"the {server.name} server {end} during the comparison; {server.last_words}")


@asynccontextmanager
async def deployment(config: ComparisonConfig, note: Callable[[str], None]) -> AsyncGenerator[Deployment, None]:
    """Yield all servers and links of a comparison, until the block is left. Servers start and end at the same time.

    Args:
        note: function that gets a line about each server that is ready.

    Raises:
        UnavailableError: a server ended, or its start made no progress for too long; the message names it. The code in
            the block has been cancelled by then.
    """
    start = Start(config.backend.start_timeout_s, note)
    async with AsyncExitStack() as stack:
        running = Deployment(config)
        await running.link(stack)
        try:
            async with asyncio.TaskGroup() as group:
                ready = {server: asyncio.Event() for server in config.servers}
                tasks = [group.create_task(running.serve(each, start, is_ready)) for each, is_ready in ready.items()]
                for is_ready in ready.values():
                    await is_ready.wait()
                try:
                    yield running
                except SpecDecError:
                    await asyncio.sleep(GRACE_S)
                    raise
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None


async def compile_models(config: ComparisonConfig) -> None:
    """Compile the models that the servers of a comparison load, without measuring."""
    for part in config.parts:
        async with AsyncExitStack() as stack:
            running = Deployment(part)
            await running.link(stack)
            await running.compile()
