"""The core's end of the mailbox: a thread in vLLM's engine core that reads what the front sends.

The owner of the core decides what a lost link means. A core that a front has started ends with it, and with it all
processes of its group: vLLM's would stay otherwise, with the memory of their devices. A core of its own dials again
for ever, and decodes plainly meanwhile.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from specdec.inference.vllm.frames import (
    LENGTH,
    VERSION,
    FrameError,
    FromCore,
    Has,
    Hello,
    ToCore,
    length_of,
    packed,
    require_own_user,
    to_core,
)
from specdec.inference.vllm.group import end_members

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5
"""Longest that a pass waits for a front that reads nothing; the link is closed then."""
REDIAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a mailbox, as it travels in vLLM's `additional_config`.

    Attributes:
        path: path of the socket.
        model_id: id of the model, which both ends must agree on.
        owned: the core ends with its front; else it dials again for ever.
        group: group of processes that ends with the front too; 0: the core ends alone, and its workers with it.
        lookup: the core lets vLLM's own draft tokens fill passes that have no worker's.
    """

    path: str
    model_id: str
    owned: bool = True
    group: int = 0
    lookup: bool = False


class Link:
    """Link of one core.

    Args:
        rank: data-parallel rank.
        receive: takes each frame of the front, in the link's thread.
        names: returns the requests that the core has, for a front that is new.
    """

    def __init__(
        self, place: Place, rank: int, receive: Callable[[ToCore | None], None], names: Callable[[], Iterable[str]]
    ) -> None:
        self._place = place
        self._rank = rank
        self._receive = receive
        self._names = names
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._sending = threading.Lock()
        if place.owned:
            self._dial()
        threading.Thread(target=self._run, name="mailbox", daemon=True).start()

    def send(self, frame: FromCore) -> None:
        """Send a frame; it is lost if the link is."""
        with self._sending, suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(packed(frame))
                return
        # A frame that was sent in part has spoilt the link.
        self._hang_up()

    def close(self) -> None:
        """Hang up, for a core that ends in order."""
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
            with self._sending:
                link.sendall(packed(Hello(VERSION, self._place.model_id, self._rank)))
                for name in self._names():
                    link.sendall(packed(Has(name)))
                self._socket = link
        except BaseException:
            link.close()
            raise

    def _run(self) -> None:
        while not self._is_closed:
            try:
                if self._socket is None:
                    self._dial()
                self._read()
            except (OSError, EOFError, FrameError) as exc:
                self._lose(exc)

    def _read(self) -> None:
        while self._socket is not None:
            length = length_of(_exactly(self._socket, LENGTH.size))
            self._receive(to_core(_exactly(self._socket, length)))

    def _lose(self, reason: Exception) -> None:
        with self._sending:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if self._is_closed:
            return
        if self._place.owned:
            self._is_closed = True
            logger.error("the front is gone (%s): its engine core ends", reason)
            threading.Thread(target=_end, args=(self._place.group,)).start()  # no daemon: it outlives the main thread
            return
        self._receive(None)
        time.sleep(REDIAL_S)


def _exactly(link: socket.socket, length: int) -> bytes:
    """Read this many bytes; raise EOFError if the link ends before."""
    parts = bytearray()
    while len(parts) < length:
        part = link.recv(length - len(parts))
        if not part:
            raise EOFError("the link has ended")
        parts += part
    return bytes(parts)


def _end(group: int) -> None:
    """End this process, and before it the others of a group."""
    if group:
        end_members(group)
    os._exit(1)
