"""A server's processes form a group that ends as a whole, with processes that multiprocessing has just spawned."""

from __future__ import annotations

import signal
import subprocess
import sys

from specdec.inference.vllm.group import end_members, members


def test_a_spawned_process_ends_with_the_group() -> None:
    """A process that Python has just spawned belongs to the group, whatever warning filter is on its command line.

    Regression: a process was taken for Python's tracker of shared memory if a filter on its command line
    named the tracker. So a server that ended during its start left workers behind.
    """
    quiet = "-Wignore::UserWarning:multiprocessing.resource_tracker"
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, quiet, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert members(process.pid) == [process.pid]
        end_members(process.pid)
        assert process.wait() == -signal.SIGTERM
