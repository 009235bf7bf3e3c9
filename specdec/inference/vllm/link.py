"""The core's end of the mailbox (mailbox.py), by which vLLM's engine core gets draft tokens and sends its reports.

A thread reads what the other end sends: the front, that is this project's server or its pool of draft workers.

The owner of the core decides what a lost link means. A core that a front has started ends when the front ends, together
with all processes of its group, which would otherwise stay and keep the memory of their devices. A core that no front
has started dials again for ever, and decodes without draft tokens meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

from specdec.inference.errors import SpecDecError
from specdec.inference.request import Noise
from specdec.inference.vllm.frames import (
    LENGTH,
    VERSION,
    FromCore,
    Has,
    Hello,
    Served,
    ToCore,
    length_of,
    packed,
    require_own_user,
    to_core,
)
from specdec.inference.vllm.group import end_members
from specdec.inference.vllm.translation import SOCKET

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5
"""Longest wait of a pass, in seconds, for a server that reads nothing; the link is closed then."""
REDIAL_S = 1.0
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Most unsent bytes that a core of vLLM's own server keeps for a pool that reads nothing; the link is closed then."""


@dataclass(frozen=True, slots=True)
class Place:
    """Address of the mailbox that an engine core dials, and rules for the core, both from vLLM's `additional_config`.

    Attributes:
        path: path of the socket.
        model_id: id of the model, which both ends must agree on.
        owned: True if this project's server has started the core, which then ends with it; else the core dials again
            whenever the link is lost.
        noise: rule by which a seed gives random numbers (docs/noise.md), for a core that vLLM's own server started;
            None: that of vLLM's runner.
        group: group of processes that ends with that server too; 0: the core ends alone, and its workers with it.
        lookup: True if passes without a worker's tokens verify tokens that the core looks up in the request.
        answers_bytes: memory, in bytes, for answers that were given before.
    """

    path: str
    model_id: str = ""
    owned: bool = True
    noise: Noise | None = None
    group: int = 0
    lookup: bool = False
    answers_bytes: int = 0

    def of_pool(self, served: Served) -> Place:
        """Return these settings with a pool's socket, and with the model id of a core that vLLM's own server started.

        A pool takes cores with the same vocabulary and the same rule for random numbers; weights and length of their
        models may differ.
        """
        digest = hashlib.sha256(served.tokenizer).hexdigest()[:32]
        path = self.path or str(default_folder() / SOCKET)
        return replace(self, path=path, model_id=f"{digest} {served.vocab_size} {served.noise}")


def default_folder() -> Path:
    """Return the folder in which a pool and cores of this user find each other; no environment variable moves it."""
    return Path(f"/tmp/specdec-{os.geteuid()}")


class Link:
    """Connection of one engine core to the mailbox of a server or pool.

    Args:
        place: address of the mailbox, and rules for the core.
        receive: function that takes each message of the server or pool, in the link's thread; None: the link is lost.
        requests: function that yields the announcements of the core's requests, sent at each new connection.
        served: description of the core's model for a pool; None for this project's server.
    """

    def __init__(
        self,
        place: Place,
        receive: Callable[[ToCore | None], None],
        requests: Callable[[], Iterable[Has]],
        served: Served | None = None,
    ) -> None:
        self._place = place
        self._hello = Hello(VERSION, place.model_id, served)
        self._receive = receive
        self._requests = requests
        self._unsent = bytearray()
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._sending = threading.Lock()
        if place.owned:
            self._dial()
        threading.Thread(target=self._run, name="mailbox", daemon=True).start()

    def send(self, frame: FromCore) -> None:
        """Send a frame, which is lost if the link is lost."""
        with self._sending, suppress(OSError):
            if self._socket is not None:
                self._write(self._socket, packed(frame))
                return
        # A frame that was sent in part has spoilt the link.
        self._hang_up()

    def _write(self, link: socket.socket, data: bytes) -> None:
        """Send data. A core that vLLM's own server started does not wait: unsent bytes are sent with the next data.

        Raises:
            OSError: the link is lost, or more than MAX_UNSENT_BYTES are unsent.
        """
        if self._place.owned:
            link.sendall(data)
            return
        self._unsent += data
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: link.send(self._unsent, socket.MSG_DONTWAIT)]
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise OSError(f"{len(self._unsent)} bytes are unread")

    def close(self) -> None:
        """Close the link, for a core that ends normally."""
        self._is_closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _dial(self) -> None:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(self._place.path)
            require_own_user(link)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
            link.sendall(packed(self._hello))
        except BaseException:
            link.close()
            raise
        with self._sending:
            self._socket = link
        for has in self._requests():  # one that arrives meanwhile may be named twice
            self.send(has)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                if self._socket is None:
                    self._dial()
                self._read()
            except (OSError, EOFError, SpecDecError) as exc:
                self._lose(exc)

    def _read(self) -> None:
        assert self._socket is not None
        with self._socket.makefile("rb") as frames:
            while True:
                length = length_of(_exactly(frames, LENGTH.size))
                self._receive(to_core(_exactly(frames, length)))

    def _lose(self, reason: Exception) -> None:
        with self._sending:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            self._unsent.clear()
        if self._is_closed:
            return
        if self._place.owned:
            self._is_closed = True
            logger.error("the front is gone (%s): its engine core ends", reason)
            threading.Thread(target=_end, args=(self._place.group,)).start()  # no daemon: it outlives the main thread
            return
        self._receive(None)
        time.sleep(REDIAL_S)


def _exactly(frames: BufferedReader, length: int) -> bytes:
    """Read `length` bytes; raise EOFError if the link ends before."""
    if len(part := frames.read(length)) < length:
        raise EOFError("the link has ended")
    return part


def _end(group: int) -> None:
    """End this process, and before it the other processes of a group."""
    if group:
        end_members(group)
    os._exit(1)
