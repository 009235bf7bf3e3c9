"""Requests of operators to a server: report its load, and drain."""

from __future__ import annotations

import asyncio

from inference.errors import ForbiddenError
from inference.observe.metrics import SlotLoad


class Operation:
    """Load and drain of one server.

    Args:
        load: load of the server.
        may_drain: whether a call may end it.
    """

    def __init__(self, load: SlotLoad, *, may_drain: bool) -> None:
        self.load = load
        self.is_draining = False
        self._may_drain = may_drain
        self._asked = asyncio.Event()

    def drain(self) -> None:
        """Begin to drain, as on SIGTERM.

        Raises:
            ForbiddenError: without an auth file, every client could end the server.
        """
        if not self._may_drain:
            raise ForbiddenError("without an auth file all may do everything but end it: drain needs an --auth_file")
        self._asked.set()

    async def until_drain(self) -> None:
        """Wait for a call of `drain`."""
        await self._asked.wait()
