"""What operators ask of a server, and tell it: how busy it is, and to drain."""

from __future__ import annotations

import asyncio

from inference.errors import ForbiddenError
from inference.observe.metrics import SlotLoad


class Operation:
    """Of one server.

    Args:
        load: knows how busy it is.
        may_drain: whether a call may end it.
    """

    def __init__(self, load: SlotLoad, *, may_drain: bool) -> None:
        self.load = load
        self.is_draining = False
        self._may_drain = may_drain
        self._told = asyncio.Event()

    def drain(self) -> None:
        """Begin to drain, as on SIGTERM.

        Raises:
            ForbiddenError: anybody of the network could call it.
        """
        if not self._may_drain:
            raise ForbiddenError("whoever reaches this port may do everything but end it: drain needs an --auth_file")
        self._told.set()

    async def told_to_drain(self) -> None:
        """Wait for that."""
        await self._told.wait()
