"""Trial compilation of grammars in another process, which can be stopped, unlike a thread.

`try_out` sends it a grammar. The limits of llguidance count units of work, and one unit has no limit of time
or memory: where a text must match several expressions at once, it grows with the product of their branches. 1 kB of
JSON schema kept a core busy for ever, and took all memory.
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
_lock = threading.Lock()
_process: TrialProcess | None = None


class TrialProcess(subprocess.Popen[str]):
    """Process that compiles one grammar after another, until one exceeds the limits."""

    def __init__(self) -> None:
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=path, text=True)
        atexit.register(self.wait_for_end)
        if not self.answers(""):
            raise OSError(f"its process ended at once, with status {self.wait_for_end()}")

    def answers(self, line: str) -> bool:
        """Return whether the process still runs after a line of input."""
        with suppress(BrokenPipeError):
            print(line, file=self.stdin, flush=True)
        return bool(self.stdout and self.stdout.readline())

    def wait_for_end(self) -> int:
        """Close the input; return the exit status."""
        atexit.unregister(self.wait_for_end)
        self.communicate()
        return self.returncode


def try_out(source: str) -> None:
    """Compile a grammar, in llguidance's own form, in the other process, where it can do no harm.

    Raises:
        ValueError: the grammar takes too much time or memory.
        InternalError: the trial failed for another reason, which is not the grammar's fault.
    """
    try:
        passes = _passes(source)
    except OSError as exc:
        raise InternalError(f"a grammar cannot be tried out: {exc}") from exc
    if not passes:
        limits = f"{TRIAL_CPU_S} s of a core, {TRIAL_BYTES >> 20} MiB"
        raise ValueError(f"too complex: too many ways for expressions to hold at once (the limit is {limits})")


@lru_cache(maxsize=64)
def _passes(source: str) -> bool:
    global _process
    with _lock:
        if _process is None or _process.poll() is not None:
            _process = TrialProcess()
        if _process.answers(json.dumps([TRIAL_CPU_S, source])):
            return True
        ended, _process = _process, None
    if ended.wait_for_end() == -signal.SIGKILL:
        raise OSError("the process that does it was killed")
    return False


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
