"""Supervisors that Ray Serve places, restarts and scales, each of one ordinary server process. No token passes here.

`targets`, `drafts` and `gateway` build the applications that serve.yaml names.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import grpc
import ray
from ray import serve

from deploy.ray.child import CALL_S, DRAIN_S, Child
from deploy.ray.registry import BEAT_S, registry
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from inference.config import DialSecurity

logger = logging.getLogger("ray.serve")

HUNG_S = 15.0
"""Seconds without an answer after which a target is replaced."""
FILES = ("ca", "cert", "key", "token_file")


class Supervisor:
    """Supervisor of one server: it restarts a server that ends, and Serve replaces it if the server cannot start.

    Args:
        flags: flags of the role.
        host: address to listen on; "node" is the one by which other nodes know this one.
        security: fields of `DialSecurity` for dialling the server, for targets with certificates or tokens.
    """

    role: ClassVar[str]

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, flags: Sequence[str], host: str, security: Mapping[str, Any]
    ) -> None:
        self._registry = registry()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        files = {name: Path(security[name]) for name in FILES if name in security}
        self._security = DialSecurity(**{**security, **files})
        where = ray.util.get_node_ip_address() if host == "node" else host
        self._flags = [*flags, "--host", where, *await self._own_flags()]
        self._child = await self._begin()
        self._background(self._keep())

    async def _own_flags(self) -> list[str]:
        """Return the flags that the user does not set; wait for everything that the server needs to start."""
        raise NotImplementedError

    async def _attend(self, child: Child) -> None:
        """Do the role's work while a server runs."""

    async def _begin(self) -> Child:
        return await Child.start(self.role, self._flags, self._security)

    async def _keep(self) -> None:
        while True:
            attending = self._background(self._attend(self._child))
            code = await self._child.ended()
            attending.cancel()
            logger.warning("%s ended with code %d: another one begins", self.role, code)
            await asyncio.sleep(BEAT_S)
            self._child = await self._begin()

    def _background(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()

    async def check_health(self) -> None:
        """Report a failure to Serve.

        Raises:
            Exception: a background task has failed, such as another start of the server.
        """
        if self._fault is not None:
            raise self._fault

    async def __del__(self) -> None:
        """Drain the server; Serve announces the end of a replica in no other way."""
        for task in self._tasks:
            task.cancel()
        code = await self._child.drain()
        logger.info("%s has drained, and ended with code %d", self.role, code)


class Target(Supervisor):
    """Supervisor of a target: it renews the target's lease and reports the load by which Serve scales."""

    role = "target"
    _load = pb.GetLoadResponse()
    _heard_at: float | None = None  # None: no server runs

    async def _own_flags(self) -> list[str]:
        self._key = serve.get_replica_context().replica_tag
        return ["--port", "0"]

    async def _attend(self, child: Child) -> None:
        node, self._heard_at = ray.get_runtime_context().get_node_id(), time.monotonic()
        try:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    self._load, self._heard_at = await child.load(), time.monotonic()
                    await self._registry.put.remote(self._key, child.address, node)
                await asyncio.sleep(BEAT_S)
        finally:
            self._heard_at = None
            self._registry.remove.remote(self._key)

    async def check_health(self) -> None:
        """See `Supervisor`; raises TimeoutError, too, if the target hangs."""
        await super().check_health()
        if self._heard_at is not None and time.monotonic() - self._heard_at > HUNG_S:
            raise TimeoutError(f"the target has not answered for {HUNG_S:g} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for `scaling.by_slots`: requests never pass Serve, so it cannot count them."""
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
            version, addresses = await self._registry.wait.remote(version)
            if addresses:  # an empty list keeps the last targets, which may only not have renewed yet
                part.write_text("".join(f"{address}\n" for address in addresses))
                part.replace(self._file)
                first.set()


class Draft(Follower):
    """Supervisor of a draft worker in the pools of all targets."""

    role, flag = "draft", "--attach"


class Gateway(Follower):
    """Supervisor of a gateway: OpenAI's HTTP API on a port of its own, in front of all targets."""

    role, flag = "gateway", "--target_host"


def application(kind: type[Supervisor], args: Mapping[str, Any], **options: Any) -> Any:
    """Return an application of one deployment.

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
    """See `application`."""
    return application(Target, args)


def drafts(args: dict[str, Any]) -> Any:
    """See `application`."""
    return application(Draft, args)


def gateway(args: dict[str, Any]) -> Any:
    """See `application`."""
    return application(Gateway, args)
