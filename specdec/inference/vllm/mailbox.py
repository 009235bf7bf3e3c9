"""The mailbox at this project's server or pool: a unix socket that vLLM's engine cores dial, each with its own link."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import stat
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
"""Seconds after which a link without a first message is closed; engine cores send it as soon as they dial."""


class Mailbox:
    """Links to vLLM's engine cores of one model, over a unix socket that the cores dial.

    All calls come from one event loop.

    Args:
        folder: folder of the socket, of this user alone (mode 0700); `open` makes it unless it exists.
        model_id: id that the first frame of a core must have; empty takes that of the first core.

    Attributes:
        receive: function that takes the number of a link and each frame of its core, None when the link has ended.
        hello: first frame of the cores that are linked now, or were last.
    """

    def __init__(self, folder: Path, model_id: str = "") -> None:
        self.receive: Callable[[int, FromCore | None], None] = lambda core, frame: None
        self._folder, self._model_id = folder, model_id
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._numbers = itertools.count()
        self.hello: Hello | None = None
        self._changed = asyncio.Event()
        self.path = self._folder / SOCKET
        self._server: asyncio.Server | None = None
        self._lock: int | None = None  # descriptor of the folder

    async def open(self) -> None:
        """Listen at the mailbox's socket.

        Raises:
            ConfigError: the folder's path is too long for a unix socket, others may enter the folder, or another
                mailbox is open in it.
        """
        require_private(self._folder)
        self._require_alone()
        try:
            self._server = await asyncio.start_unix_server(self._serve, self.path)
        except OSError as exc:
            fault = f"no socket can be made at {self.path} ({exc})"
            way = "--mailbox, for a target TMPDIR, names a folder with a shorter path, in which nothing has this name"
            raise ConfigError(f"{fault}: {way}") from exc
        self.path.chmod(0o600)

    def _require_alone(self) -> None:
        """Lock the folder, until `close` or the end of this process, against other mailboxes in it."""
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            fault = f"another pool has the mailbox {self._folder}"
            raise ConfigError(f"{fault}: end it, or give this one another --mailbox") from exc

    def forget(self) -> None:
        """Close the listening socket; for a forked child, in which it would stay open after the end of the parent."""
        for listener in () if self._server is None else self._server.sockets:
            os.close(listener.fileno())

    async def close(self) -> None:
        """Close all links, and remove the socket if this mailbox has made it."""
        for link in self._links.values():
            link.close()
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def until_linked(self, num_cores: int) -> None:
        """Wait until at least `num_cores` engine cores are linked."""
        while len(self._links) < num_cores:
            self._changed.clear()
            await self._changed.wait()

    @property
    def num_links(self) -> int:
        return len(self._links)

    def is_linked(self, core: int) -> bool:
        return core in self._links

    def send(self, core: int, frame: ToCore) -> None:
        """Send a frame to the core with this number; the frame is lost if the link is lost."""
        link = self._links.get(core)
        if link is None:
            return
        link.write(packed(frame))
        if link.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            logger.warning("engine core %d reads nothing: its link is closed", core)
            link.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        core = None
        try:
            require_own_user(writer.get_extra_info("socket"))
            async with asyncio.timeout(HELLO_S):
                hello = await _frame(reader)
            core = self._greet(hello, writer)
            while True:
                self.receive(core, await _frame(reader))
        except FrameError as exc:
            logger.warning("a link of the mailbox is closed: %s", exc)
        except (EOFError, OSError, asyncio.CancelledError):  # the end of this task
            logger.debug("the link of core %s has ended", core)
        finally:
            if core is not None:
                del self._links[core]
                self._changed.set()
                self.receive(core, None)
            with suppress(OSError):
                writer.close()

    def _greet(self, hello: FromCore, writer: asyncio.StreamWriter) -> int:
        """Return a number for the link of a new engine core, after a check of its first message.

        Raises:
            FrameError: the message is no `Hello`, or names another version or model.
        """
        if not isinstance(hello, Hello) or hello.version != VERSION or hello.model_id != self._expected(hello):
            raise FrameError(f"it began with {hello!r:.200}, not with version {VERSION} and its model")
        core, self.hello = next(self._numbers), hello
        self._links[core] = writer
        self._changed.set()
        return core

    def _expected(self, hello: Hello) -> str:
        """Return the model's id that a new core must have; if no other core is linked, this is the core's own id."""
        if self._model_id or self.hello is None or not self._links:
            return self._model_id or hello.model_id
        return self.hello.model_id


async def _frame(reader: asyncio.StreamReader) -> FromCore:
    return from_core(await reader.readexactly(length_of(await reader.readexactly(LENGTH.size))))


def require_private(folder: Path) -> None:
    """Make the folder of a mailbox, unless it exists, and check that only this user can enter it.

    Raises:
        ConfigError: the folder cannot be made, or others may enter it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError as exc:
        raise ConfigError(f"no mailbox in {folder} ({exc}): give another --mailbox") from exc
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"the mailbox {folder} must be a folder of this user alone, of mode 0700: give another")
