"""Trial compilation of grammars in a process of its own, which can be stopped, unlike a thread.

llguidance limits the number of its steps, but not the time or memory of a step: where a text must match several
expressions at once, a step takes as much as the product of their numbers of branches. 1 kB of JSON schema kept a core
busy for ever, and took all memory.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from specdec.inference.errors import CapacityError, InternalError
from specdec.inference.text.grammar_source import parser_limits

TRIAL_CPU_S, TRIAL_BYTES = 3, 1 << 30
TRIAL_WALL_S = 5.0
"""Seconds after which the trial compilation of a grammar is ended if other requests wait for it; on busy cores it may
take this long although it needs much less CPU time."""
MAX_KNOWN = 64
_POLL_MS = 100
_results: dict[str, bool] = {}
_lock = threading.Lock()
_process: subprocess.Popen[str] | None = None


def try_out(source: str, is_awaited: Callable[[], bool] = lambda: False) -> None:
    """Compile a grammar in a process of its own, to find out whether that takes too much time or memory.

    Args:
        source: the grammar, in the form that the library llguidance takes.
        is_awaited: function that returns whether other requests wait for the end of this call.

    Raises:
        ValueError: the grammar takes too much time or memory.
        CapacityError: the call took `TRIAL_WALL_S`, and was ended because other requests wait.
        InternalError: the process failed for another reason, which is not the grammar's fault.
    """
    try:
        passes = _passes(source, is_awaited)
    except OSError as exc:
        raise InternalError(f"a grammar cannot be tried out: {exc}") from exc
    if not passes:
        limits = f"{TRIAL_CPU_S} s of a core, {TRIAL_BYTES >> 20} MiB"
        raise ValueError(f"too complex: too many ways for expressions to hold at once (the limit is {limits})")


def _passes(source: str, is_awaited: Callable[[], bool]) -> bool:
    if (known := _results.get(source)) is not None:  # without the lock, which another trial may hold
        return known
    with _lock:
        if source not in _results:
            if len(_results) >= MAX_KNOWN:
                del _results[next(iter(_results))]
            _results[source] = _survives(source, is_awaited)
        return _results[source]


def _survives(source: str, is_awaited: Callable[[], bool]) -> bool:
    global _process
    if _process is None or _process.poll() is not None:
        _ended()
        _process = _started()
        if not _answers(_process, "", lambda: False):
            raise OSError(f"its process ended at once, with status {_ended()}")
    if _answers(_process, json.dumps([TRIAL_CPU_S, source]), is_awaited):
        return True
    if _ended() == -signal.SIGKILL:
        raise OSError("the process that does it was killed")
    return False


def _started() -> subprocess.Popen[str]:
    """Start the process that compiles one grammar after another, and ends if one exceeds the limits; return it."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=path, text=True)


def _answers(process: subprocess.Popen[str], line: str, is_awaited: Callable[[], bool]) -> bool:
    """Send a line of input to the process that compiles grammars; return True once it answers, False if it has ended.

    Raises:
        CapacityError: no answer came within `TRIAL_WALL_S`, and other requests wait; the process has been ended.
    """
    with suppress(BrokenPipeError):
        print(line, file=process.stdin, flush=True)
    if process.stdout is None:
        return False
    deadline, output = time.monotonic() + TRIAL_WALL_S, select.poll()
    output.register(process.stdout)
    while not output.poll(_POLL_MS):
        if time.monotonic() > deadline and is_awaited():
            process.kill()
            _ended()
            message = f"the machine is busy: the trial of this grammar did not end within {TRIAL_WALL_S:g} s"
            raise CapacityError(f"{message}, and other requests wait", retry_after_s=TRIAL_WALL_S)
    return bool(process.stdout.readline())


@atexit.register
def _ended() -> int:
    """End the process that compiles grammars, by closing its input; return its exit status, or 0 if there is none."""
    global _process
    process, _process = _process, None
    if process is not None:
        process.communicate()
    return 0 if process is None else process.returncode


def _serve() -> None:
    """Compile each grammar that arrives on standard input, and print an empty line after each.

    The process that `try_out` asks runs this. It ends at a grammar that takes too much time or memory.
    """
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
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # counts CPU time; its signal ends the process
            with suppress(ValueError):
                LLMatcher(tokenizer, source, log_level=0, limits=parser_limits()).compute_bitmask()
        print(flush=True)


if __name__ == "__main__":
    _serve()
