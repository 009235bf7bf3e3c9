"""The road from an engine to whoever waits for a session's tokens."""

from __future__ import annotations

import asyncio

from inference.types import Commit


class CommitQueue:
    """Commits of one session in order, or the error that ended it. Bounded by the session's own max_new_tokens."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Commit | Exception] = asyncio.Queue()

    def put(self, commit: Commit) -> None:
        self._queue.put_nowait(commit)

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    async def get(self) -> Commit:
        """The next commit.

        Raises:
            Exception: what `fail` was given, after the commits before it.
        """
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item
