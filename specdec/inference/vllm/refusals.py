"""Errors of vLLM, each in one line: those of this process, and the first one that a core or a worker has logged.

vLLM's other processes give their reasons only to vLLM's log. So each of them logs through `log`, which keeps the first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from specdec.inference.errors import ConfigError
from specdec.inference.text.grammar_source import brief
from specdec.inference.vllm.hooks import installed

FIRST_ERROR = "SPECDEC_VLLM_FIRST_ERROR"
"""Variable that names the file of the first error that any process of a server has logged."""


class Log:
    """Stream for vLLM's log in each of its processes, which copies the log to stderr.

    The first error of all processes of a server is kept in a file, which `FIRST_ERROR` names.
    """

    def write(self, text: str) -> None:
        error = sys.exc_info()[1]  # vLLM logs an error while it handles it
        if error is not None and "ERROR" in text:
            with suppress(KeyError, OSError), Path(os.environ[FIRST_ERROR]).open("x", encoding="utf-8") as file:
                file.write(_in_one_line(error))
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


log = Log()


def cause_of(error: BaseException) -> str:
    """Return in one line why vLLM failed: the first error that one of its processes has logged, else `error`."""
    with suppress(KeyError, OSError):
        return Path(os.environ[FIRST_ERROR]).read_text(encoding="utf-8")
    return _in_one_line(error)


@contextmanager
def refusals(flags: Sequence[str] = ()) -> Iterator[None]:
    """Turn any error in the block, in which vLLM starts, into a ConfigError of one line.

    Args:
        flags: vLLM's own flags; one with a value that the error names is named with it.

    Raises:
        ConfigError: vLLM has failed.
    """
    try:
        yield
    except Exception as exc:
        cause = cause_of(exc)
        raise ConfigError(f"vLLM {installed()} refuses this: {_named(flags, cause)}{cause}") from exc


def _named(flags: Sequence[str], cause: str) -> str:
    """Return the first flag with a value that the cause names, such as "--quantization fp8: "."""
    words = {*re.findall(r"[a-z]\w+", cause), *re.findall(r"[a-z][a-z0-9]+", cause)}
    given = (f"{flag} {value}: " for flag, value in pairwise(flags) if flag.startswith("--") and value in words)
    return next(given, "")


def _in_one_line(error: BaseException) -> str:
    """Return an error of vLLM as one line; for a pydantic error, the line begins with the field and its value."""
    faults = error.errors() if isinstance(error, ValueError) and hasattr(error, "errors") else ()
    for fault in faults:
        place = ".".join(map(str, fault["loc"]))
        return in_brief(f"{place} {fault['input']!r}: {fault['msg']}" if place else fault["msg"])
    return in_brief(str(error) or type(error).__name__)


def in_brief(text: str) -> str:
    """Return a message of vLLM in one line, without what its libraries put around it."""
    text = re.sub(r"\d+ validation errors? for \w+\n", "", text).partition(" [type=")[0].replace("Value error, ", "")
    return brief(text.replace("See root cause above", "Lines above say why"))
