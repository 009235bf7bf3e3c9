"""Server of a compared program: a process with an HTTP port, which is ended with the process that started it."""

from __future__ import annotations

import atexit
import http.client
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import UnavailableError, last_line

ANSWER_S = 300.0
_RUNNING: list[subprocess.Popen[bytes]] = []


@atexit.register
def _end_all() -> None:
    for process in _RUNNING:
        process.terminate()
    for process in _RUNNING:
        process.wait()


class Server:
    """Process of a server, with its log.

    Args:
        port: HTTP port, which `command` must set.
        environment: environment variables; None takes those of this process.
    """

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> None:
        self.port = port
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, env=environment
        )
        _RUNNING.append(self._process)

    def wait(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `is_ready` returns True, at most `seconds` seconds.

        Raises:
            UnavailableError: the server has ended (the message is its log's last line), or was not ready in time.
        """
        ends = time.monotonic() + seconds
        while not is_ready():
            if self._process.poll() is not None:
                raise UnavailableError(last_line(self.log()))
            if time.monotonic() > ends:
                raise UnavailableError(f"the server at port {self.port} was not ready within {seconds:g} s")
            time.sleep(0.2)

    def log(self) -> str:
        """Return all output of the server so far."""
        return Path(self._log.name).read_text(errors="replace")

    def answers(self, path: str) -> bool:
        """Return whether a GET request of this path succeeds."""
        try:
            list(self.lines("GET", path))
        except (OSError, UnavailableError, http.client.HTTPException):
            return False
        return True

    def lines(self, method: str, path: str, body: Any = None) -> Iterator[bytes]:
        """Send a request, with `body` as JSON unless it is None; yield the lines of the answer as they arrive.

        Raises:
            UnavailableError: the answer has an error status.
        """
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise UnavailableError(f"HTTP {answer.status}: {answer.read()[:200].decode(errors='replace')}")
            yield from answer


def at_once(one: Callable[[list[int]], list[int]], prompts: Sequence[list[int]]) -> list[list[int]]:
    """Call `one` for all prompts at once, each in a thread of its own; return the answers in the same order."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))
