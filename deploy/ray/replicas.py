"""Supervisors that Ray Serve places, restarts and scales; each runs one ordinary server process. Tokens bypass Ray.

`targets`, `drafts` and `gateways` build the applications that serve.yaml names.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import grpc
import ray
from ray import serve

from deploy.ray.child import CALL_S, DRAIN_S, Child
from deploy.ray.registry import BEAT_S, registry
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.config import DialSecurity

logger = logging.getLogger("ray.serve")

HUNG_S = 15.0
"""Seconds without an answer to a probe after which a server is killed, and another one begun."""
FILES = ("ca", "cert", "key", "token_file")


class Supervisor:
    """Supervisor of one server: it restarts a server that ends or hangs, and Serve replaces it if none can start.

    Args:
        flags: flags of the role.
        host: address to listen on; "node" is this node's address in the cluster.
        security: fields of `DialSecurity` for dialling the server, for targets with certificates or tokens.
    """

    role: ClassVar[str]
    _registry: Any = None
    _child: Child | None = None
    _fault: BaseException | None = None

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, flags: Sequence[str], host: str, security: Mapping[str, Any]
    ) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        files = {name: Path(security[name]) for name in FILES if name in security}
        self._security = DialSecurity(**{**security, **files})
        where = ray.util.get_node_ip_address() if host == "node" else host
        self._flags = [*flags, "--host", where, *await self._own_flags()]
        self._background(self._keep(await self._begin()))

    async def _own_flags(self) -> list[str]:
        """Return the flags that the user does not set; wait for everything that the server needs to start."""
        raise NotImplementedError

    async def _attend(self, child: Child) -> None:
        """Do the role's own work, such as renewing a lease, while a child process runs; its end cancels the work."""

    async def _begin(self) -> Child:
        self._child = await Child.start(self.role, self._flags, self._security)
        return self._child

    async def _keep(self, child: Child) -> None:
        """Start a new server each time the present one ends."""
        while True:
            beside = [self._background(work) for work in (self._attend(child), self._watch(child))]
            code = await child.ended()
            for task in beside:
                task.cancel()
            logger.warning("%s ended with code %d: another one begins", self.role, code)
            await asyncio.sleep(BEAT_S)
            child = await self._begin()

    async def _watch(self, child: Child) -> None:
        """Kill a server that hangs."""
        answered_at = time.monotonic()
        while time.monotonic() - answered_at < HUNG_S:
            await asyncio.sleep(BEAT_S)
            if await child.is_alive():
                answered_at = time.monotonic()
        logger.warning("%s has not been alive for %g s: it is killed", self.role, HUNG_S)
        child.kill()

    async def _registered(self, method: str, *args: Any) -> Any:
        """Call the registry; while it cannot be reached, log that and try again every BEAT_S."""
        while True:
            try:
                self._registry = self._registry or await asyncio.to_thread(registry)
                return await getattr(self._registry, method).remote(*args)
            except ray.exceptions.RayError as exc:
                logger.warning("the registry of targets does not answer: %s", exc)
                self._registry = None
                await asyncio.sleep(BEAT_S)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()

    async def check_health(self) -> None:
        """Raise a background task's failure, on which Serve replaces the replica.

        Raises:
            BaseException: a background task has failed, such as another start of the server.
        """
        if self._fault is not None:
            raise self._fault

    async def __del__(self) -> None:
        """Drain the server; Serve calls no other method at the end of a replica."""
        for task in self._tasks:
            task.cancel()
        if self._child is not None:
            code = await self._child.drain()
            logger.info("%s has drained, and ended with code %d", self.role, code)


class Target(Supervisor):
    """Supervisor of a target: it renews the target's lease and reports the load by which Serve scales."""

    role = "target"
    _load = pb.GetLoadResponse()

    async def _own_flags(self) -> list[str]:
        self._key = serve.get_replica_context().replica_tag
        return ["--port", "0"]

    async def _attend(self, child: Child) -> None:
        node = ray.get_runtime_context().get_node_id()
        renewal: asyncio.Task[None] | None = None
        try:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    self._load = await child.load()
                    if renewal is None or renewal.done():  # beside: the registry may hang
                        renewal = self._background(self._registered("put", self._key, child.address, node))
                await asyncio.sleep(BEAT_S)
        finally:
            if renewal is not None:
                renewal.cancel()
            if self._registry is not None:
                self._registry.remove.remote(self._key)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for `scaling.by_slots`; Serve cannot count requests, since they bypass it."""
        return {"busy": self._load.num_running + self._load.num_waiting, "slots": self._load.num_slots}


class Follower(Supervisor):
    """Supervisor of a server that follows the targets through a file, which it writes from the registry."""

    flag: ClassVar[str]

    async def _own_flags(self) -> list[str]:
        self._folder = await asyncio.to_thread(tempfile.TemporaryDirectory[str], prefix="specdec-")
        self._file = Path(self._folder.name) / "targets"
        first = asyncio.Event()
        self._background(self._follow(first))
        await first.wait()
        return [self.flag, f"file://{self._file}"]

    async def _follow(self, first: asyncio.Event) -> None:
        version, part = 0, self._file.with_suffix(".part")
        while True:
            version, addresses = await self._registered("wait", version)
            if addresses:  # an empty list keeps the last targets, which may only not have renewed yet
                part.write_text("".join(f"{address}\n" for address in addresses))
                part.replace(self._file)
                first.set()


class Draft(Follower):
    """Supervisor of a draft worker in the pools of all targets."""

    role, flag = "draft", "--attach"


class Gateway(Follower):
    """Supervisor of a gateway: OpenAI's HTTP API on the gateway's own port, in front of all targets."""

    role, flag = "gateway", "--target_host"


def application(kind: type[Supervisor], args: Mapping[str, Any], **options: Any) -> Any:
    """Return a Ray Serve application that deploys supervisors of one class.

    Args:
        args: flags (a list), host ("node" by default), security (a mapping); see `Supervisor`.
        options: further options of the deployment.
    """
    patience = {
        "graceful_shutdown_timeout_s": DRAIN_S + CALL_S,
        "health_check_period_s": 1,
        "health_check_timeout_s": 10,
    }
    deployment = serve.deployment(**patience)(kind).options(**options)
    return deployment.bind(args.get("flags", []), args.get("host", "node"), args.get("security", {}))


def targets(args: dict[str, Any]) -> Any:
    """Return the application of the targets; `args` are as for `application`."""
    return application(Target, args)


def drafts(args: dict[str, Any]) -> Any:
    """Return the application of the draft workers; `args` are as for `application`."""
    return application(Draft, args)


def gateways(args: dict[str, Any]) -> Any:
    """Return the application of the gateways; `args` are as for `application`."""
    return application(Gateway, args)
