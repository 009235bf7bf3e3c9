"""A comparison continues when endpoints (servers that it did not start) fail, and its report has every failure."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import resource
import socket
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from specdec.comparison.app import _compare as compare
from specdec.comparison.app import loop_for
from specdec.comparison.plan.flags import parse_config
from specdec.comparison.report.files import in_full, prepare_directory, write_report
from specdec.comparison.report.findings import json_of
from tests.support.foreign import foreign_server


async def test_failures_are_counted_by_code(tmp_path: Path) -> None:
    """If some or all prompts fail, failures are counted by error code, and the report is still written."""
    (tmp_path / "some.txt").write_text("plain\nit dies here\nit fails\n")
    (tmp_path / "none.txt").write_text("busy\nbusy again\n")
    async with foreign_server() as one, foreign_server() as other:
        flags = ["--endpoint", f"one={one.url}", "--endpoint", f"other={other.url}", "--num_runs", "2"]
        flags += ["--dataset", str(tmp_path / "some.txt"), "--dataset", str(tmp_path / "none.txt")]
        config = parse_config([*flags, "--concurrency", "1,2", "--output", str(tmp_path / "report")])
        findings = await compare(config, Console(file=io.StringIO()))
    prepare_directory(config.output)
    in_full(config, "results.json", results := json_of(findings), partial(write_report, findings))
    errors = {
        (it["endpoint"], it["kind"], it["concurrency"]): it["error_code_frequency"] for it in results["statistics"]
    }
    assert errors["one", "some", 1] == {"DISCONNECTED": 2, "IN_STREAM": 2}
    assert errors["other", "none", 2] == {"503": 8}
    assert {(cell["endpoint"], cell["kind"]) for cell in results["cells"]} == {("one", "some"), ("other", "some")}
    said = {request["error_code"]: request["error_msg"] for cell in results["requests"] for request in cell}
    assert ("come back later" in said["503"], "out of memory" in said["IN_STREAM"]) == (True, True)
    assert (results["same_tokens"], results["not_comparable"]) == (None, ["one", "other"])
    assert all(cell["client_share"] > 0 for cell in results["cells"])
    assert findings.num_failed == 2 * ((4 + 4) + (4 + 8))
    assert findings.agreement.holds
    page = (config.output / "report.html").read_text()
    assert "not comparable, models are not known to be the same: one, other" in page
    assert (config.output / "config.toml").read_text() == config.asked


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2048, reason="so many files may not be open")
def test_endpoints_exceed_the_limit_of_select() -> None:
    """More than 1023 endpoints can be open at once.

    Regression: more than 1023 endpoints at once ended in a ValueError, since select() takes no file descriptor above
    that.
    """
    config = parse_config(["--endpoint", "a=http://127.0.0.1:9/v1", "--concurrency", "1500"])
    near, far = socket.socketpair()
    high = fcntl.fcntl(far, fcntl.F_DUPFD, 2000)
    with near, far, asyncio.Runner(loop_factory=loop_for(config)) as runner:
        loop, came = runner.get_loop(), asyncio.Event()
        loop.add_reader(high, came.set)
        near.send(b"!")
        runner.run(asyncio.wait_for(came.wait(), 60))
        loop.remove_reader(high)
    os.close(high)
