"""The front's end of the mailbox: a unix socket that vLLM's engine cores dial, one link per data-parallel rank."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from specdec.inference.errors import ConfigError
from specdec.inference.vllm.frames import (
    LENGTH,
    VERSION,
    FrameError,
    FromCore,
    Hello,
    ToCore,
    from_core,
    length_of,
    packed,
    require_own_user,
)
from specdec.inference.vllm.translation import SOCKET

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Most bytes that a core may leave unread; its link is closed then."""
HELLO_S = 30.0
"""Longest time, in seconds, until a link's first frame has arrived: cores send it as they dial."""


class Mailbox:
    """Links to the schedulers in the engine cores of one model. All calls come from one event loop.

    Args:
        model_id: id that the first frame of a core must have; empty takes that of the first core.
        folder: folder of the socket, of mode 0700, for cores of any number of servers; None makes one for the cores of
            this process, and removes it in the end.

    Attributes:
        receive: function that takes a core's rank and each of its frames, None when its link has ended. Cores of
            several servers have numbers in place of ranks.
        hello: first frame of the cores that are linked now, or were last.
    """

    def __init__(self, model_id: str, folder: Path | None = None) -> None:
        self.receive: Callable[[int, FromCore | None], None] = lambda rank, frame: None
        self._model_id = model_id
        self._lasts = folder is not None
        self._folder = folder or Path(tempfile.mkdtemp(prefix="specdec-"))  # for this user alone: 0700
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._numbers = itertools.count()
        self.hello: Hello | None = None
        self._changed = asyncio.Event()
        self.path = self._folder / SOCKET
        self._server: asyncio.Server | None = None
        self._listener: socket.socket | None = None
        self._lock: int | None = None  # descriptor of the folder

    async def open(self) -> None:
        """Listen at the mailbox's socket.

        Raises:
            ConfigError: the folder's name is too long for a unix socket, it is not this user's alone, or another pool
                has it.
        """
        if self._lasts:
            require_private(self._folder)
            self._require_alone()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self.path))
        except OSError as exc:
            listener.close()
            way = "--mailbox" if self._lasts else "TMPDIR"
            fault = f"no socket can be made at {self.path} ({exc})"
            raise ConfigError(
                f"{fault}: {way} names a folder with a shorter path, in which nothing has this name"
            ) from exc
        self.path.chmod(0o600)
        self._listener = listener
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    def _require_alone(self) -> None:
        """Take the folder, until `close` or the end of this process; remove the socket of a pool that is gone."""
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            fault = f"another pool has the mailbox {self._folder}"
            raise ConfigError(f"{fault}: end it, or give this one another --mailbox") from exc
        if self.path.is_socket():
            self.path.unlink()

    def forget(self) -> None:
        """Close the listener in a forked child, where it would answer after the end of this process."""
        if self._listener is not None:
            os.close(self._listener.fileno())

    async def close(self) -> None:
        """Close all links, and remove the socket if this mailbox has made it."""
        for link in self._links.values():
            link.close()
        if self._listener is not None and self._server is not None:
            self._listener = None
            self._server.close()
            self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if not self._lasts:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def until_linked(self, num_ranks: int) -> None:
        """Wait until at least `num_ranks` engine cores are linked."""
        while len(self._links) < num_ranks:
            self._changed.clear()
            await self._changed.wait()

    @property
    def num_links(self) -> int:
        return len(self._links)

    def is_linked(self, rank: int) -> bool:
        return rank in self._links

    def send(self, rank: int, frame: ToCore) -> None:
        """Send a frame to the core of a rank; the frame is lost if the link is lost."""
        link = self._links.get(rank)
        if link is None:
            return
        link.write(packed(frame))
        if link.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            logger.warning("the core of rank %d reads nothing: its link is closed", rank)
            link.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        try:
            require_own_user(writer.get_extra_info("socket"))
            async with asyncio.timeout(HELLO_S):
                hello = await _frame(reader)
            rank = self._greet(hello, writer)
            while True:
                self.receive(rank, await _frame(reader))
        except FrameError as exc:
            logger.warning("a link of the mailbox is closed: %s", exc)
        except (EOFError, OSError, asyncio.CancelledError):  # the end of this task
            logger.debug("the link of rank %s has ended", rank)
        finally:
            if rank is not None and self._links.get(rank) is writer:
                del self._links[rank]
                self._changed.set()
                self.receive(rank, None)
            with suppress(OSError):
                writer.close()

    def _greet(self, hello: FromCore, writer: asyncio.StreamWriter) -> int:
        """Return the rank of a new engine core, after a check of its first message; its link replaces an older one."""
        if not isinstance(hello, Hello) or hello.version != VERSION or hello.model_id != self._expected(hello):
            raise FrameError(f"it began with {hello!r:.200}, not with version {VERSION} and its model")
        rank, self.hello = next(self._numbers) if self._lasts else hello.rank, hello
        if (old := self._links.get(rank)) is not None:
            old.close()
        self._links[rank] = writer
        self._changed.set()
        return rank

    def _expected(self, hello: Hello) -> str:
        """Return the model's id that a new core must have; if no other core is linked, this is the core's own id."""
        if self._model_id or self.hello is None or not self._links:
            return self._model_id or hello.model_id
        return self.hello.model_id


async def _frame(reader: asyncio.StreamReader) -> FromCore:
    return from_core(await reader.readexactly(length_of(await reader.readexactly(LENGTH.size))))


def require_private(folder: Path) -> None:
    """Make the folder of a mailbox that outlives a server, unless it exists; check that only this user can enter it.

    Raises:
        ConfigError: it cannot be made, or others may enter it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError as exc:
        raise ConfigError(f"no mailbox in {folder} ({exc}): give another --mailbox") from exc
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"the mailbox {folder} must be a folder of this user alone, of mode 0700: give another")
