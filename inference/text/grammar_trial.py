"""Trial compilation of a grammar in a process of its own, which can be stopped, unlike a thread.

`try_out` starts the process; the rest of this module runs in it. The limits of llguidance count units of work, and one
unit has no limit of time or memory: where a text must match several expressions at once, it grows with the product of
their branches. 1 kB of JSON schema kept a core busy for ever, and took all memory.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache

from inference.errors import InternalError
from inference.text.grammar_source import parser_limits

TRIAL_S, TRIAL_CPU_S, TRIAL_BYTES = 8.0, 3, 1 << 30
_MEETING = re.compile(r'[&~]|\\u|("(?:pattern|format|multipleOf|And|Not).*){2}', re.DOTALL)
"""Signs that a text must match several expressions at once: an operator, an escape that may hide one, or two words."""


@lru_cache(maxsize=64)
def try_out(source: str) -> None:
    """Compile a grammar, in llguidance's own form, if a text may have to match several of its expressions at once.

    A success is cached.

    Raises:
        ValueError: the grammar takes too much time or memory.
        InternalError: no process can be started.
    """
    if not _MEETING.search(source):
        return
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, text = [sys.executable, "-m", __name__, str(TRIAL_CPU_S)], source.encode()
    try:
        subprocess.run(command, input=text, env=path, capture_output=True, timeout=TRIAL_S, check=True)
    except subprocess.SubprocessError as exc:
        limits = f"{TRIAL_CPU_S} s of a core, {TRIAL_BYTES >> 20} MiB"
        raise ValueError(f"too complex: too many ways for expressions to hold at once (the limit is {limits})") from exc
    except OSError as exc:
        raise InternalError(f"a grammar cannot be tried out: {exc}") from exc


def _try(cpu_s: int) -> None:
    """Compile a grammar from standard input, in the other process. Invalid ones are reported by the caller."""
    from llguidance import LLMatcher, LLTokenizer

    os.nice(5)  # requests in service go first
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with suppress(ValueError):
        LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=parser_limits()).compute_bitmask()


if __name__ == "__main__":
    _try(int(sys.argv[1]))
