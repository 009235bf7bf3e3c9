"""Life cycle of every server: open its ports, wait for a signal, drain, close.

A drain has this order. All ports report that they are not ready. After a delay, in which load balancers notice that,
they take no new requests. Running requests may end within the grace period, after which the rest fail with a message.
Then the ports close. The process ends even if something hangs. Processes without a port have the same life cycle.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from signal import Signals
from typing import Any, Protocol

from specdec.inference.config import ServerConfig
from specdec.inference.errors import InternalError
from specdec.inference.observe.metrics import Metrics
from specdec.inference.serving.signals import end_after, end_at_once_on_signal, stdin_ended, stop_signal
from specdec.inference.workers.completing.generation import Operation

logger = logging.getLogger(__name__)

WATCH_S = 0.1
"""Seconds between two checks of the engine's state; how late a check comes shows the event loop's lag."""
FORCE_AFTER_S = 2.0
"""Seconds after the end of the grace period, at which a process that still runs ends at once."""


class Front(Protocol):
    """Interface of a port on which requests arrive, as its `Host` opens and drains it."""

    @property
    def ports(self) -> dict[str, int]:
        """Return the numbers of the opened ports, by name."""

    async def open(self) -> None:
        """Listen, and report to health checks that requests are accepted."""

    def report(self, *, ready: bool, alive: bool = True) -> None:
        """Set what health checks report: `ready` if requests are accepted, `alive` unless a restart would help.

        The port itself goes on accepting requests.
        """

    async def refuse_new(self) -> None:
        """Keep new requests away; running ones continue."""

    async def close(self) -> None:
        """End the remaining requests, and close the port."""


class Work(Protocol):
    """Interface of what runs the requests of a process, such as an engine, as its `Host` watches and drains it."""

    @property
    def fault(self) -> str | None:
        """Return why no requests are served at the moment; None if they are."""

    @property
    def hangs(self) -> bool:
        """Return whether `fault` is due to a thread that may never end."""

    @property
    def broken(self) -> str | None:
        """Return why no request will ever be served again; None if the engine is not broken."""

    async def stop(self, *, grace_s: float) -> None:
        """Take no new requests, let running ones finish for `grace_s` seconds, and fail the remaining ones."""


class Host:
    """Server process: its work, its ports, and their life cycle.

    Args:
        work: runner of requests, which is watched and drained.
        fronts: ports, in the order in which they open.
        config: settings with the durations of a drain.
        metrics: metrics that record the event loop's lag; None records nothing.
        operation: receiver of gRPC calls of Drain; None if no call can drain the server.
    """

    def __init__(
        self,
        work: Work,
        fronts: Sequence[Front] = (),
        *,
        config: ServerConfig,
        metrics: Metrics | None = None,
        operation: Operation | None = None,
    ) -> None:
        self._work = work
        self._fronts = fronts
        self._config = config
        self._metrics = metrics
        self._operation = operation

    async def run(self, until: Awaitable[object] | None = None) -> None:
        """Serve until a signal, a gRPC call of Drain, the end of `until` or of stdin (if set so), or a permanent fault.

        Raises:
            Exception: the error with which `until`, or the watch of the work, ended.
            InternalError: the work can never serve a request again.
        """
        async with AsyncExitStack() as stack:
            for front in self._fronts:
                await stack.enter_async_context(opened(front))
            # Objects loaded by now stay. Each search for garbage among them would stop the loop for 40 ms.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            if self._config.ready_json:
                ports = {name: port for front in self._fronts for name, port in front.ports.items()}
                line = {"ready": True, "pid": os.getpid(), "host": self._config.host, "ports": ports}
                print(json.dumps(line), flush=True)
            await self._serve(until)
            forced_s = self._config.drain_delay_s + self._config.grace_s + FORCE_AFTER_S
            last_resort = end_after(forced_s, 1, partial(logger.error, "still not stopped: the process ends now"))
            await self._drain()
        if self._work.broken is None and not self._work.hangs:  # else the interpreter might wait for a thread
            last_resort.cancel()
        logger.info("stopped")
        if self._work.broken is not None:
            raise InternalError(self._work.broken)

    async def _drain(self) -> None:
        if self._operation is not None:
            self._operation.is_draining = True
        for front in self._fronts:
            front.report(ready=False, alive=self._work.broken is None)
        if self._work.broken is None:
            await asyncio.sleep(self._config.drain_delay_s)
        for front in reversed(self._fronts):
            await front.refuse_new()
        await self._work.stop(grace_s=self._config.grace_s)

    async def _serve(self, until: Awaitable[object] | None) -> None:
        signal, watching = asyncio.create_task(stop_signal()), asyncio.create_task(self._watch())
        causes: dict[asyncio.Task[Any], str] = {signal: "a signal"}
        if self._operation is not None:
            causes[asyncio.create_task(self._operation.until_drain())] = "a call of Drain"
        if self._config.lifeline is not None:
            causes[asyncio.create_task(stdin_ended())] = "the end of stdin"
        end = asyncio.ensure_future(until if until is not None else asyncio.Event().wait())
        await asyncio.wait({*causes, end, watching}, return_when=asyncio.FIRST_COMPLETED)
        by = next((what for task, what in causes.items() if task.done()), None)
        for task in {*causes, end, watching} - ({signal} if by else set()):
            task.cancel()
        if by is not None:
            signal.add_done_callback(_end_at_next)
            name = signal.result().name if signal.done() else by
            grace = f"running requests get {grace_s:g} s" if (grace_s := self._config.grace_s) else "stopping"
            logger.info("%s: %s; a second signal ends at once", name, grace)
        elif end.done() and not end.cancelled():
            end.result()
        elif watching.done():
            watching.result()

    async def _watch(self) -> None:
        """Watch the work, and report each change of its state to all ports, until it is broken for good."""
        reported, was_ready = (True, True), False
        if self._metrics is not None:
            self._metrics.watch_loop(asyncio.get_running_loop())
        while self._work.broken is None:
            fault, alive = self._work.fault, not self._work.hangs
            if (fault is None, alive) != reported:
                reported = (fault is None, alive)
                again = "ready again" if was_ready else "ready"
                logger.log(
                    logging.WARNING if was_ready else logging.INFO, again if fault is None else f"not ready: {fault}"
                )
                for front in self._fronts:
                    front.report(ready=fault is None, alive=alive)
            was_ready |= fault is None
            before = time.monotonic()
            await asyncio.sleep(WATCH_S)
            if self._metrics is not None:
                self._metrics.take_loop_lag(time.monotonic() - before - WATCH_S)


def _end_at_next(first: asyncio.Task[Signals]) -> None:
    """Make the next signal end the process at once; called when `first`, which waits for the first signal, is done."""
    if not first.cancelled():
        end_at_once_on_signal()


@asynccontextmanager
async def opened(front: Front) -> AsyncGenerator[None, None]:
    """Keep a port open during the block."""
    await front.open()
    try:
        yield
    finally:
        await front.close()
