"""Trial compilation of grammars in another process, which can be stopped, unlike a thread.

The limits of llguidance count units of work, and one unit has no limit of time or memory: where a text must match
several expressions at once, it grows with the product of their branches. 1 kB of JSON schema kept a core busy for ever,
and took all memory.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache

from specdec.inference.errors import CapacityError, InternalError
from specdec.inference.text.grammar_source import parser_limits

TRIAL_CPU_S, TRIAL_BYTES = 3, 1 << 30
TRIAL_WALL_S = 5.0
"""Seconds after which a trial ends even if busy cores gave it less CPU time: the grammars of others wait for it."""
_lock = threading.Lock()
_process: subprocess.Popen[str] | None = None


def try_out(source: str) -> None:
    """Compile a grammar, in llguidance's own form, in a process of its own, where it can do no harm.

    Raises:
        ValueError: the grammar takes too much time or memory.
        CapacityError: the machine is too busy for the trial.
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
            _ended()
            _process = _started()
            if not _answers(_process, ""):
                raise OSError(f"its process ended at once, with status {_ended()}")
        late = threading.Timer(TRIAL_WALL_S, _process.kill)
        late.start()
        passes = _answers(_process, json.dumps([TRIAL_CPU_S, source]))
        is_late = not late.is_alive()
        late.cancel()
        if passes:
            return True
        if _ended() == -signal.SIGKILL:
            if is_late:
                fault = f"the machine is too busy to try this grammar out within {TRIAL_WALL_S:g} s"
                raise CapacityError(fault, retry_after_s=TRIAL_WALL_S)
            raise OSError("the process that does it was killed")
        return False


def _started() -> subprocess.Popen[str]:
    """Start a process that compiles one grammar after another, until one exceeds the limits."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=path, text=True)


def _answers(process: subprocess.Popen[str], line: str) -> bool:
    """Send the process a line of input; return whether the process still runs afterwards."""
    with suppress(BrokenPipeError):
        print(line, file=process.stdin, flush=True)
    return bool(process.stdout and process.stdout.readline())


@atexit.register
def _ended() -> int:
    """End the trial process by closing its input; return its exit status, 0 if there is no process."""
    global _process
    process, _process = _process, None
    if process is not None:
        process.communicate()
    return 0 if process is None else process.returncode


def _serve() -> None:
    """Compile the grammars that arrive on standard input, in the trial process, and ignore invalid ones."""
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
