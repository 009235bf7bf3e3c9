"""The front's end of the mailbox: a unix socket that vLLM's engine cores dial, one link per data-parallel rank."""

from __future__ import annotations

import asyncio
import logging
import shutil
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

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Most bytes that a core may leave unread; its link is closed then."""


class Mailbox:
    """Links to the schedulers in the engine cores of one model. All calls come from one event loop.

    Args:
        model_id: id that the first frame of a core must have.
        folder: folder of the socket, of mode 0700; None makes one, and removes it in the end.

    Attributes:
        receive: takes each frame of a core, with its rank; None where its link has ended.
    """

    def __init__(self, model_id: str, folder: Path | None = None) -> None:
        self.receive: Callable[[int, FromCore | None], None] = lambda rank, frame: None
        self._model_id = model_id
        self._lasts = folder is not None
        self._folder = folder or Path(tempfile.mkdtemp(prefix="specdec-"))  # for this user alone: 0700
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self.path = self._folder / "core"
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: the folder of temporary files has too long a name for a unix socket.
        """
        try:
            self._server = await asyncio.start_unix_server(self._serve, self.path)
        except OSError as exc:
            raise ConfigError(f"no socket at {self.path} ({exc}): TMPDIR names a folder with a shorter path") from exc
        self.path.chmod(0o600)

    async def close(self) -> None:
        """Close all links, and remove the socket."""
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close()
        self.path.unlink(missing_ok=True)
        if not self._lasts:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def until_linked(self, num_ranks: int) -> None:
        """Wait for the links of all ranks."""
        while len(self._links) < num_ranks:
            self._changed.clear()
            await self._changed.wait()

    def is_linked(self, rank: int) -> bool:
        return rank in self._links

    def send(self, rank: int, frame: ToCore) -> None:
        """Send a frame to the core of a rank; it is lost if the link is."""
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
            rank = self._greet(await _frame(reader), writer)
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
        """Return the rank of a new core, whose link replaces an older one's."""
        if not isinstance(hello, Hello) or hello.version != VERSION or hello.model_id != self._model_id:
            raise FrameError(f"it began with {hello}, not with version {VERSION} and model {self._model_id}")
        if (old := self._links.get(hello.rank)) is not None:
            old.close()
        self._links[hello.rank] = writer
        self._changed.set()
        return hello.rank


async def _frame(reader: asyncio.StreamReader) -> FromCore:
    return from_core(await reader.readexactly(length_of(await reader.readexactly(LENGTH.size))))
