"""A command's process ends even if a thread hangs or its output has no reader; its log leaves out libraries' lines."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time

import pytest

from specdec.inference.caller import OneLine
from specdec.inference.cli.app import QuietLibraries
from specdec.inference.config import ROOT

DONE = """
import asyncio, concurrent.futures, sys, time
import specdec.inference.cli.app as app
import specdec

async def work():
    asyncio.get_running_loop().run_in_executor({executor}, time.sleep, 600)
    return 3

app.main = lambda arguments: app._run(work())
sys.exit(specdec.main())
"""


@pytest.mark.parametrize("executor", ["None", "concurrent.futures.ThreadPoolExecutor(1)"])
def test_an_endless_thread_does_not_delay_the_end(executor: str) -> None:
    """A process whose work is done ends, even if one of its threads is still running.

    Regression: after its last request a server stayed for minutes, since a thread waited for a silent DNS server or
    ran an endless chat template.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", DONE.format(executor=executor)], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert time.monotonic() - began < 30
    assert done.returncode == 3
    assert "a thread that is still at work" in done.stderr


WRITER = """
import asyncio, sys
from specdec.inference.cli import app
from specdec.inference.cli.prompts import topologies

async def write(job, connection):
    async with asyncio.TaskGroup():
        print("x", flush=True)

topologies.run_edge = write
sys.exit(app.main(["--role", "fused_client"]))
"""


def written_to(stdout: int) -> tuple[int, str]:
    """Run a client that writes to the file descriptor `stdout`; return its exit code and stderr."""
    done = subprocess.run([sys.executable, "-c", WRITER], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    return done.returncode, done.stderr


def test_a_reader_that_left_is_no_failure() -> None:
    """A command whose output nobody reads any more ends without an error message, with exit code 1.

    Regression: `fused_client --format json | head -1` printed an ExceptionGroup of a BrokenPipeError.
    """
    reader, writer = os.pipe()
    os.close(reader)
    assert written_to(writer) == (1, "")
    os.close(writer)


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        assert written_to(full.fileno()) == (1, "error: [Errno 28] No space left on device\n")


NXDI = "/opt/venv/neuronx_distributed_inference/models/config.py"


def record(level: int, message: str, *, path: str = NXDI, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("root", level, path, line, message, (), None)


@pytest.mark.parametrize(
    ("level", "message", "shown"),
    [
        (logging.INFO, "calling forward on network context_encoding_model", [False, False]),
        (logging.WARNING, "TP degree (2) and KV heads (8) are not divisible", [True, False]),
        (logging.WARNING, "NeuronConfig init: Unexpected keyword arguments: {'a': 1}", [False, False]),
        (logging.ERROR, "out of memory", [True, True]),
    ],
)
def test_nxdi_logs_each_warning_once(level: int, message: str, shown: list[bool]) -> None:
    """The log has errors of NxDI (AWS's NxD Inference) each time, warnings once, and its other lines never.

    Warnings about unexpected arguments are left out too. `shown` says whether the line is logged at its first and at
    its second time.

    Regression: only 8 of 250 lines in a draft's log were the draft's own, since NxDI logs to the root logger.
    """
    quiet = QuietLibraries()
    assert [quiet.filter(record(level, message)) for _ in range(2)] == shown


def test_other_lines_are_logged_every_time() -> None:
    quiet = QuietLibraries()
    ours = record(logging.INFO, "ready", path="/srv/inference/serving/assembly.py")
    assert quiet.filter(ours)
    assert quiet.filter(ours)
    assert quiet.filter(record(logging.WARNING, "one", line=1))
    assert quiet.filter(record(logging.WARNING, "another", line=2))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("ExecuteBatchError raised in core by servicer method [/specdec.v1.GenerationService/Generate]", False),
        ("Unexpected [ValueError] raised by servicer method [/specdec.v1.GenerationService/Generate]", True),
    ],
)
def test_a_client_gone_at_the_last_write(message: str, shown: bool) -> None:
    """A client that disconnects during the last message to it causes no traceback in the log.

    `shown` tells whether the log keeps the line `message`.

    Regression: 1 in some 1,000 clients disconnected while its status was sent, and gRPC put a traceback into the
    target's log.
    """
    told = logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "server.pyx", 1, message, (), None)
    assert QuietLibraries().filter(told) is shown


def test_calls_that_the_end_cancels_leave_no_traceback() -> None:
    """Calls that a server's end cancels leave no traceback in the log, though gRPC would log one; errors still do."""
    for error, shown in ((asyncio.CancelledError(), False), (ValueError(), True)):
        cause = (type(error), error, None)
        told = logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "server.pyx", 1, "not handled", (), cause)
        assert QuietLibraries().filter(told) is shown


def test_no_text_of_a_peer_ends_a_line_of_the_log() -> None:
    """Text from a peer, such as a name, cannot begin a new line of the log.

    Regression: a certificate's name with a newline forged a line of the audit log.
    """
    record = logging.LogRecord(
        "specdec.audit", logging.INFO, "", 0, "refused: %s", ("a\nINFO caller=root \x1b[2J",), None
    )
    assert OneLine("%(name)s %(message)s").format(record) == "specdec.audit refused: a\\nINFO caller=root \\x1b[2J"


def test_a_line_of_the_log_has_an_end() -> None:
    """A line of the log is cut to a maximum length.

    Regression: a session's name of 100 kB, which a hostile target chose, made a line of 100 kB.
    """
    record = logging.LogRecord("specdec", logging.WARNING, "", 0, "session %s", ("x" * 100_000,), None)
    line = OneLine("%(message)s").format(record)
    assert len(line) < 5000
    assert line.endswith("... (100008 characters)")
