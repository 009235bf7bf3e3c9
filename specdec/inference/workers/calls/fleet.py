"""Fleet: the servers of one model to which a process sends requests, with a gRPC channel and a health watch for each.

With a channel for each, a request can use one server and avoid another; `inference/scheduling/replicas.py` chooses. Of
the requests, the fleet knows only how long each used a server, and how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.grpc_comm.channel import UnreachableError, open_channel, wait_until_ready
from specdec.grpc_comm.health import is_serving, served
from specdec.grpc_comm.names import Addresses, addresses_of
from specdec.grpc_comm.options import MAX_STREAMS_PER_CONNECTION
from specdec.grpc_comm.secured import Headers
from specdec.inference.config import PLAIN, ConnectionConfig, DialSecurity
from specdec.inference.errors import (
    ForbiddenError,
    HandshakeError,
    InternalError,
    OtherServerError,
    UnauthenticatedError,
    UnavailableError,
)
from specdec.inference.scheduling.replicas import Replicas
from specdec.inference.scheduling.retry_budget import RetryBudget
from specdec.inference.workers.calls.admitting import passed_on
from specdec.inference.workers.calls.dialling import credentials_of, named
from specdec.inference.workers.calls.status import calls_to

logger = logging.getLogger(__name__)

LATELY_S = 8.0
"""Seconds after the loss of a server in which it may be back without this process knowing: a gRPC channel reconnects
only after 5 s and some jitter."""
LOOK_AGAIN_S = 5.0
ATTEMPT_S, RETRY_S = 10.0, 1.0
"""Most seconds of an attempt to connect at start, and seconds between attempts."""
REFUSES_US = (UnauthenticatedError, ForbiddenError, OtherServerError)
"""Errors by which a server shows that it refuses every request of this process.

They count as failures of the server. Otherwise it would seem the least loaded one, since refusals come so fast.
"""


@dataclass(slots=True, eq=False)
class Replica:
    """Server of a fleet, and figures of the requests that this process has sent there.

    Attributes:
        address: HOST:PORT of the server.
        channel: channel to the server; the fleet closes it.
        security: credentials for the server, and the name that its certificate must have.
        following: task that follows the server's health.
        num_leases: requests of this process that the server is answering.
        released: event that is set whenever one of these requests ends.
        num_ended, num_failed: requests that have ended, and those of them that the server failed.
        busy_s: sum of the times of these requests at the server, in seconds.
        num_tokens: output tokens that the server sent.
    """

    address: str
    channel: grpc.aio.Channel
    security: DialSecurity
    following: asyncio.Task[None] | None = None
    num_leases: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)
    num_ended: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    num_tokens: int = 0


class Fleet:
    """Servers of one model, with connections to them: a context manager, to be entered in a running event loop.

    Args:
        targets: HOST:PORT, dns:///NAME:PORT for all servers of a name, or file:///PATH for the servers of a list.
        security: credentials of this process, and certificate authorities that it trusts.
        headers: function that returns further headers for each gRPC call, such as those of a trace.
    """

    def __init__(self, targets: Sequence[str], security: DialSecurity = PLAIN, headers: Headers = dict) -> None:
        self._targets = targets
        self._security = security
        self._headers = headers
        self.budget = RetryBudget()
        """Budget that limits how often requests are sent again after failures; all requests of the process share it."""
        self._policy = Replicas()
        self._replicas: dict[str, Replica] = {}
        self._served_at = -math.inf
        self._changed = asyncio.Event()
        self._looking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Fleet:
        """Open a channel to each server, and return the fleet; from then on, follow changes of the servers' addresses.

        Raises:
            ConfigError: a certificate or token file cannot be used.
            UnreachableError: a name cannot be resolved.
        """
        names = addresses_of(self._targets)
        self._take(await anext(names))
        self._background(self._resolve(names))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas.values():
            await _close(replica)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, which is cancelled when the fleet is closed.

        A reference to the task is kept, since the event loop keeps none.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def label(self) -> str:
        """Return the servers' addresses as the configuration names them, for messages."""
        return ", ".join(self._targets)

    @property
    def replicas(self) -> Collection[Replica]:
        return self._replicas.values()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    async def until_one_answers(self, timeout_s: float) -> None:
        """Wait, at start, until this process is connected to one of the servers.

        Raises:
            UnreachableError: no server is connected in time, or none of the connections can ever succeed.
        """
        waiting = {asyncio.create_task(self._until_ready(each, timeout_s)) for each in self._replicas.values()}
        try:
            failures: list[BaseException] = []
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failures += [failure for task in done if (failure := task.exception()) is not None]
                if len(failures) + len(waiting) < len(self._replicas):
                    return
            raise failures[0] if len(failures) == 1 else UnreachableError("; ".join(map(str, failures)))
        finally:
            for task in waiting:
                task.cancel()

    async def _until_ready(self, replica: Replica, timeout_s: float) -> None:
        keys = credentials_of(replica.security)
        tls = None if keys is None else keys.tls
        await wait_until_ready(replica.channel, replica.address, timeout_s=timeout_s, tls=tls)
        self._report(replica, True)  # until its health watch reports otherwise

    @contextmanager
    def lease(
        self, *, prefix: str = "", failed: Collection[str] = (), unfit: Collection[str] = ()
    ) -> Generator[Replica, None, None]:
        """Yield the server to which a request is to be sent, and count the request there until the block ends.

        Args:
            prefix: hash of the prompt's beginning; a server that got an equal one before is preferred. Empty: the load
                alone decides.
            failed: addresses at which the request has just failed, to be tried last.
            unfit: addresses that must not get the request.

        Raises:
            UnavailableError: every server is in `unfit`.
        """
        address = self._policy.choose(time.monotonic(), prefix=prefix, failed=failed, unfit=unfit)
        if address is None:
            raise UnavailableError("none of the servers can take the request", address=self.label)
        replica = self._replicas[address]
        replica.num_leases += 1
        has_failed, began = None, time.monotonic()
        try:
            yield replica
            has_failed = False
        except (UnavailableError, InternalError, *REFUSES_US):
            has_failed = True
            raise
        finally:
            now = time.monotonic()
            replica.num_leases -= 1
            replica.num_ended += 1
            replica.num_failed += has_failed is True
            replica.busy_s += now - began
            replica.released.set()
            self._policy.ended(address, now, failed=has_failed)

    def has_other(self, *than: str) -> bool:
        """Return whether any server except those at the addresses `than` is ready and not paused after failures."""
        return self._policy.has_other(time.monotonic(), than=than)

    def is_ready(self, replica: Replica) -> bool:
        """Return whether a server's latest health report says that it takes requests; False without a report."""
        record = self._policy.records.get(replica.address)
        return record is not None and record.ready

    @property
    def _serves(self) -> bool:
        return any(record.ready for record in self._policy.records.values())

    @property
    def has_served_lately(self) -> bool:
        """Return whether any server is ready, or was ready within the last `LATELY_S` seconds."""
        return self._serves or time.monotonic() - self._served_at < LATELY_S

    async def serves(self) -> AsyncGenerator[bool, None]:
        """Yield, without end, whether any server is ready: once at the beginning, and after each possible change."""
        while True:
            changed = self._changed
            yield self._serves
            await changed.wait()

    def look_again(self) -> None:
        """Make the iterators of `serves` yield again after `LOOK_AGAIN_S` seconds, even if nothing changes.

        Code that calls a server whenever `serves` yields can try again in this way after its call failed.
        """
        if self._looking is not None:
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._notify_watchers)

    async def is_serving(self) -> bool:
        """Ask all servers for their health; return True as soon as one reports that it serves, False if none does."""
        asking = [asyncio.create_task(self._is_serving(replica)) for replica in self._replicas.values()]
        try:
            for answer in asyncio.as_completed(asking):
                if await answer:
                    return True
            return False
        finally:
            for task in asking:
                task.cancel()

    async def _is_serving(self, replica: Replica) -> bool:
        """Return whether a server serves, by asking it.

        If half of the streams that its connection allows are in use, return what its latest health report says instead:
        the question would take one more.
        """
        if replica.num_leases >= MAX_STREAMS_PER_CONNECTION // 2:
            return self.is_ready(replica)
        return await is_serving(replica.channel)

    async def _resolve(self, names: AsyncGenerator[Addresses, None]) -> None:
        async for addresses in names:
            self._take(addresses)

    def _take(self, addresses: Addresses) -> None:
        """Make the fleet consist of the servers at `addresses`, a table from HOST:PORT to the DNS name that led to it.

        The name is None for an address that was given as such. The channel to a server that is no longer in the fleet
        is closed once its requests have ended.
        """
        for address in set(self._replicas) - set(addresses):
            self._background(_leave(self._replicas.pop(address)))
        for address, name in addresses.items():
            if address not in self._replicas:
                self._replicas[address] = self._opened(address, name)
        self._policy.keep(list(addresses))
        self._notify_watchers()

    def _opened(self, address: str, name: str | None) -> Replica:
        security = named(self._security, name)
        channel = open_channel(address, credentials_of(security), passed_on, self._headers)
        replica = Replica(address, channel, security)
        replica.following = asyncio.create_task(self._follow(replica))
        return replica

    async def _follow(self, replica: Replica) -> None:
        async with aclosing(served(replica.channel)) as answers:
            async for serves in answers:
                self._report(replica, serves)

    def _report(self, replica: Replica, serves: bool) -> None:
        if self._serves:
            self._served_at = time.monotonic()
        if self._policy.set_ready(replica.address, ready=serves):
            self._notify_watchers()

    def _notify_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _leave(replica: Replica) -> None:
    while replica.num_leases:
        replica.released.clear()
        await replica.released.wait()
    await _close(replica)


async def _close(replica: Replica) -> None:
    if replica.following is not None:
        replica.following.cancel()
    await replica.channel.close()


@asynccontextmanager
async def connected(connection: ConnectionConfig, headers: Headers = dict) -> AsyncGenerator[Fleet, None]:
    """Yield the fleet of the servers that the settings `connection` name, once one of them is connected.

    Each attempt to connect opens a new fleet: before a server has started, its name may be unknown or lead elsewhere.

    Args:
        headers: function that returns further headers for each gRPC call, such as those of a trace.

    Raises:
        ConfigError: a certificate or token file cannot be used.
        UnavailableError: no server answers within the connection's timeout, or the one that does is not trusted.
    """
    loop, complaint, patience_s = asyncio.get_running_loop(), "", connection.connect_timeout_s
    ends_at = loop.time() + patience_s
    async with AsyncExitStack() as stack:
        while True:
            timeout_s = min(ATTEMPT_S, patience_s, max(RETRY_S, ends_at - loop.time()))
            try:
                async with AsyncExitStack() as attempt:
                    with calls_to(connection.host):
                        opening = Fleet(connection.targets, connection.security, headers)
                        fleet = await attempt.enter_async_context(opening)
                        await fleet.until_one_answers(timeout_s)
                    stack.push_async_exit(attempt.pop_all())
                break
            except UnavailableError as exc:
                if isinstance(exc, HandshakeError) or loop.time() + RETRY_S > ends_at:
                    raise
                if str(exc) != complaint:
                    logger.warning("dialling for at most %g s until a server answers: %s", patience_s, exc)
                complaint = str(exc)
            await asyncio.sleep(RETRY_S)
        yield fleet
