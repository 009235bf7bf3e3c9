"""Trial of a grammar in another process, where it can be stopped: `try_out`, and what that process runs.

Where several expressions must hold at once, the time and memory of one unit of llguidance's work are the product of
their branches: 1 kB of JSON schema kept a core busy for ever, and took all memory. No thread can be stopped.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import lru_cache

from inference.errors import InternalError
from inference.text.grammar_source import parser_limits

TRIAL_CPU_S, TRIAL_BYTES = 3, 1 << 30


class TrialProcess:
    """Process that compiles one grammar after another. One that exceeds the limits ends it; the next starts another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def passes(self, source: str) -> bool:
        """Return whether a grammar, in the library's own form, compiles within the limits, be it valid or not.

        Raises:
            InternalError: the process cannot be started, or was killed from outside.
        """
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process = _started()
                if _answer(self._process, f"{json.dumps([TRIAL_CPU_S, source])}\n"):
                    return True
            except OSError as exc:
                raise InternalError(f"a grammar cannot be tried out: {exc}") from exc
            if self.close() == -signal.SIGKILL:
                raise InternalError("the process that tries grammars out was killed")
            return False

    def close(self) -> int | None:
        """Wait for the end of the process, which has no more input; return its exit status, None without a process."""
        if self._process is None:
            return None
        with suppress(ValueError):  # closed already
            self._process.communicate()
        return self._process.returncode


def _started() -> subprocess.Popen[str]:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=path, text=True)
    if not _answer(process, "\n"):
        raise OSError(f"its process ended at once, with status {process.wait()}")
    return process


def _answer(process: subprocess.Popen[str], line: str) -> str:
    """Send a line; return the answer, empty if the process has ended."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


_trials = TrialProcess()
atexit.register(_trials.close)


def try_out(source: str) -> None:
    """Compile a grammar, in the library's own form, where it can do no harm.

    Raises:
        ValueError: it takes too much time or memory.
        InternalError: it cannot be tried out; not the grammar's fault.
    """
    if not _passes(source):
        limits = f"{TRIAL_CPU_S} s of a core, {TRIAL_BYTES >> 20} MiB"
        raise ValueError(f"too complex: too many ways for expressions to hold at once (the limit is {limits})")


@lru_cache(maxsize=64)
def _passes(source: str) -> bool:
    return _trials.passes(source)


def _serve() -> None:
    """Compile the grammars from standard input, in the other process. Invalid ones are reported by the caller."""
    from llguidance import LLMatcher, LLTokenizer

    os.nice(5)  # requests in service go first
    for each in (signal.SIGINT, signal.SIGTERM):  # they are for the server; its end closes standard input
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        if line.strip():
            cpu_s, source = json.loads(line)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, resource.RLIM_INFINITY))
            with suppress(ValueError):
                LLMatcher(tokenizer, source, log_level=0, limits=parser_limits()).compute_bitmask()
        print(flush=True)


if __name__ == "__main__":
    _serve()
