"""Main function of the command line: it picks the role, sets up logging, and prints each error as one line."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from specdec.inference import VERSION
from specdec.inference.caller import NamesRequests, OneLine
from specdec.inference.cli.config_file import program
from specdec.inference.cli.roles.registry import ROLES, settings_of
from specdec.inference.cli.self_signed import make_certificates
from specdec.inference.config import ServerConfig
from specdec.inference.declared import did_you_mean
from specdec.inference.errors import ConfigError, InvalidRequestError, MissingPackageError, SpecDecError
from specdec.inference.serving.event_loop import new_event_loop
from specdec.inference.serving.models import fetched
from specdec.inference.serving.signals import end_after

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
END_S = 2.0
"""Seconds that a process may take to end once its work is done; after that it is ended by force."""
COMMANDS = {
    **{name: role.summary for name, role in ROLES.items()},
    "compare": "Measure topologies against each other (compare_architectures.py, as the three below).",
    "study": "Search for the best settings within a budget of time.",
    "diff": "Show what got slower between two reports.",
    "law": "Test whether a server's texts follow the log-probabilities that it reports.",
}
"""Summary of each command that --help lists, by the command's name; the command `help` is not listed."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"


def main(arguments: Sequence[str]) -> int:
    """Run the role that the arguments name; return the exit code: 0, 1 (failed), 2 (wrong flags), 130 (Ctrl-C)."""
    role_name, rest = _split_role(arguments)
    # Threads that spin at barriers starve a second process on the same cores; read when torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        settings = settings_of(role_name, rest)
        _set_up_logging(settings.observe.log_level)
        return _run(ROLES[role_name].run(prepared(settings)))
    except (ConfigError, InvalidRequestError) as exc:
        return _report(exc, EXIT_USAGE)
    except ModuleNotFoundError as exc:
        return _report(MissingPackageError(f"role {role_name}", exc.name), EXIT_USAGE)
    except SpecDecError as exc:
        return _report(exc, 1)
    except OSError as exc:
        return _report_lost_output(exc)
    except ExceptionGroup as group:  # several prompts run in a task group
        lost, others = group.split(OSError)
        if lost is None or others is not None:
            raise
        return _report_lost_output(lost)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format=LOG_FORMAT)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(OneLine(LOG_FORMAT))
        handler.addFilter(NamesRequests())
        if level != "debug":
            handler.addFilter(QuietLibraries())


def prepared(settings: Any) -> Any:
    """Make the TLS certificates for trials, and download the models of the hub, that the settings of a role name.

    Return the settings with the downloaded models' directories.

    Raises:
        ConfigError: a certificate cannot be written, a model cannot be fetched, or its files cannot be read here.
    """
    for each in fields(settings):
        if isinstance(value := getattr(settings, each.name), ServerConfig):
            make_certificates(value)
    return fetched(settings)


class QuietLibraries(logging.Filter):
    """Filter that drops log lines of libraries that an operator can do nothing about.

    NxD Inference writes hundreds of lines per model and request: errors are shown, and each warning once. gRPC logs a
    traceback if a caller disconnects between gRPC's last check and its last write, and for calls that are cancelled
    when a server ends: these are dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, int]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record of the log is shown."""
        if record.name == "grpc._cython.cygrpc":
            is_cancelled = record.exc_info is not None and record.exc_info[0] is asyncio.CancelledError
            return not is_cancelled and not record.getMessage().startswith("ExecuteBatchError raised in core")
        if "neuronx_distributed" not in record.pathname:
            return True
        if record.levelno >= logging.ERROR:
            return True
        place = (record.pathname, record.lineno)
        is_new = record.levelno == logging.WARNING and place not in self._seen
        self._seen.add(place)
        # Every load of a compiled model logs this, about names that NxDI itself wrote.
        return is_new and not record.getMessage().startswith("NeuronConfig init: Unexpected keyword arguments")


def _run(coroutine: Coroutine[Any, Any, int]) -> int:
    runner, code = asyncio.Runner(loop_factory=new_event_loop), 1
    try:
        code = runner.run(coroutine)
    finally:
        last_resort = end_soon(code)
        runner.close()
        last_resort.cancel()
    return code


def end_soon(code: int) -> threading.Timer:
    """Start a timer that ends the process after `END_S` seconds, even if it still waits for a thread; return the timer.

    A DNS look-up without an answer takes minutes, and another server's chat template may never end.
    """
    logger = logging.getLogger(__name__)
    return end_after(END_S, code, partial(logger.warning, "ended without a thread that is still at work"))


def _report(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _report_lost_output(error: Exception) -> int:
    """Return exit code 1 after a failed write; print the error unless stdout's reader closed the pipe, as `head` does.

    What stdout's buffer still has is discarded: Python would try to write it at exit, and report a second error.
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if isinstance(error, BrokenPipeError) else _report(error, 1)


def _split_role(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the role that the arguments name, and the other arguments; without a known role, list all and exit."""
    summaries = "\n".join(f"  {name:14} {summary}" for name, summary in COMMANDS.items())
    call = program("ROLE", "main.py --role ROLE")
    parser = argparse.ArgumentParser(
        prog=call.split()[0],
        usage=f"{call} [flags of the role]",
        description=f"commands:\n{summaries}\n\nStart with `{program('demo', 'main.py --role demo')}`. "
        f"`{call} --help` shows the flags of one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--role")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="version", version=f"specdec {VERSION}")
    known, rest = parser.parse_known_args(arguments)
    if known.role is None:
        parser.print_help(sys.stdout if known.help else sys.stderr)
        sys.exit(0 if known.help else EXIT_USAGE)
    role = known.role.replace("-", "_")
    if role not in ROLES:
        print(f"error: no command is called {known.role}{did_you_mean(known.role, COMMANDS)}", file=sys.stderr)
        print(f"commands:\n{summaries}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    return role, [*rest, "--help"] if known.help else rest
