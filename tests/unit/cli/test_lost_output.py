"""A program ends without a traceback when its stdout accepts nothing more."""

from __future__ import annotations

import os
import subprocess
import sys

from specdec.inference.config import ROOT

WRITER = """
import asyncio, sys
from specdec.inference.cli import app
from specdec.inference.cli.prompts import topologies

async def write(job, connection):
    async with asyncio.TaskGroup():
        print("x", flush=True)

topologies.run_client = write
sys.exit(app.main(["--role", "fused_client"]))
"""


def written_to(stdout: int) -> tuple[int, str]:
    """Return exit code and stderr of a client that writes to `stdout` from a task group, as for prompts."""
    done = subprocess.run([sys.executable, "-c", WRITER], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    return done.returncode, done.stderr


def test_a_reader_that_left_is_no_failure() -> None:
    """A command ends without an error if the reader of its output has left.

    It was once otherwise: `fused_client --format json | head -1` printed an ExceptionGroup of a BrokenPipeError.
    """
    reader, writer = os.pipe()
    os.close(reader)
    assert written_to(writer) == (1, "")
    os.close(writer)


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        assert written_to(full.fileno()) == (1, "error: [Errno 28] No space left on device\n")
