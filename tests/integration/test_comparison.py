"""Tests of compare_architectures.py as users run it, with real servers and tiny models."""

from __future__ import annotations

import asyncio
import html
import json
import os
import signal
import subprocess
import time
from collections import deque
from pathlib import Path

import pytest

from specdec.comparison.plan.config import OPEN_LOOP_BATCH
from tests.conftest import ModelDirectories
from tests.support.browser import CHROMIUM
from tests.support.servers import command

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two machines need two cores"),
]

PROGRAM = "compare_architectures.py"
FILES = {
    *("config.toml", "results.csv", "results.json", "report.html"),
    *("speedup_by_kind.png", "tokens_over_rtt.png", "latency_shares.png"),
}


def _flags(models: ModelDirectories, output: Path) -> list[str]:
    """Return the flags of a comparison that takes only seconds, and writes its report to `output`/report."""
    prompts = output / "structured.txt"
    prompts.parent.mkdir(exist_ok=True)
    prompts.write_text("1 2 3 and\nin the wing\n")
    pair = ["--target-model", str(models.target), "--draft-models", str(models.related)]
    load = ["--prompt-file", str(prompts), "--num-runs", "2", "--rtt-ms", "0,5", "--max-new-tokens", "12"]
    load += ["--request-rate", "50", "--num-arrivals", "3", "--slo", "ttft:20s"]
    return [*pair, *load, "--temperature", "0.8", "--seed", "7", "--gamma", "3", "--output", str(output / "report")]


async def test_comparison_end_to_end(models: ModelDirectories, tmp_path: Path) -> None:
    """A comparison ends with exit code 0, and with equal tokens from all topologies.

    It writes all of its files, a line of JSON, and an HTML page that works in a browser.
    """
    async with command(*_flags(models, tmp_path), program=PROGRAM) as process:
        stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    results = json.loads(stdout.decode().splitlines()[-1])
    assert results["same_tokens"] is True
    # Warm-up, one by one and then as an open loop may come; contenders, round trip times, runs; prompts one after
    # another, and what came on its own.
    assert results["num_requests"] == 5 * (1 + 2 * OPEN_LOOP_BATCH) + 5 * 2 * 2 * (2 + 3)
    for served in results["statistics"]:
        assert (served["error_rate"], served["goodput_share"]) == (0.0, 1.0)
        assert served["num_completed_requests"] == 2 * (2 if served["request_rate"] is None else 3)
        assert served["ttft_s"]["p50"] <= served["end_to_end_latency_s"]["p50"] <= served["end_to_end_latency_s"]["p99"]
    assert {(cell["topology"], cell["rtt_ms"]) for cell in results["cells"]} == {
        (topology, rtt_ms) for topology in ("target", "fused", "distributed", "pool") for rtt_ms in (0.0, 5.0)
    }
    assert {file.name for file in (tmp_path / "report").iterdir()} == FILES
    _check_in_browser(tmp_path / "report" / "report.html")


LOOK = """
const isShown = it => it.matches('summary') || !it.closest('details:not([open])');
const focusable = [...document.querySelectorAll('a, summary, [tabindex="0"]')].filter(isShown);
document.title = JSON.stringify({
  pictures: [...document.images].map(image => image.naturalWidth > 300),
  fetched: performance.getEntriesByType('resource').length,
  reached: focusable.every(it => { it.focus(); return document.activeElement === it; }),
  first: focusable[0].textContent,
  outline: (focusable[1].focus(), getComputedStyle(focusable[1]).outlineStyle),
  overflow: document.documentElement.scrollWidth > innerWidth,
});
"""


def _check_in_browser(page: Path) -> None:
    """Open a report's page in headless Chromium, and check it by a script; without Chromium, skip the test.

    All pictures must be decoded, nothing may be fetched, everything must be reachable by keyboard, and nothing may be
    wider than a narrow window.
    """
    if CHROMIUM is None:
        pytest.skip("the report was not opened: no Chromium here (apt-get install chromium)")
    script = f"<script>{LOOK}</script></body>"
    copy = page.with_name("opened.html")
    copy.write_text(page.read_text().replace("</body>", script))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"]
    flags += ["--window-size=600,800"]
    dom = subprocess.run([CHROMIUM, *flags, copy.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(html.unescape(dom.stdout.partition("<title>")[2].partition("</title>")[0])) == {
        "pictures": [True, True, True],
        "fetched": 0,
        "reached": True,
        "first": "Skip to the results",
        "outline": "solid",
        "overflow": False,
    }


@pytest.mark.parametrize(
    ("victim", "topologies"),
    [pytest.param("target", "distributed", marks=pytest.mark.release), ("pool-draft", "target,pool")],
)
async def test_killing_a_server_is_a_clear_failure(
    models: ModelDirectories, tmp_path: Path, victim: str, topologies: str
) -> None:
    """A comparison whose server is killed ends within 10 s with exit code 1, names it, and leaves no process."""
    flags = [*_flags(models, tmp_path), "--num-runs", "1000", "--topologies", topologies]
    async with command(*flags, program=PROGRAM) as process:
        await _until_measuring(process)
        servers = _children(process.pid)
        os.kill(servers[victim], signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = await process.communicate()
    assert time.monotonic() - killed < 10.0
    assert process.returncode == 1
    assert f"error: the {victim} server was killed by SIGKILL" in stderr.decode()
    assert not [name for name, pid in servers.items() if _is_alive(pid)]


@pytest.mark.parametrize(
    ("number", "is_started", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)], ids=["work", "start"]
)
async def test_a_signal_leaves_no_process(
    models: ModelDirectories, tmp_path: Path, number: signal.Signals, is_started: bool, code: int
) -> None:
    """A signal ends a comparison and all of its servers, both while it measures and while the servers start."""
    flags = [*_flags(models, tmp_path), "--num-runs", "1000", "--topologies", "target,fused,distributed"]
    async with command(*flags, program=PROGRAM) as process:
        if is_started:
            await _until_measuring(process)
        while len(servers := _children(process.pid)) < 3:  # noqa: ASYNC110 - another process cannot set an event
            await asyncio.sleep(0.05)
        process.send_signal(number)
        _, stderr = await process.communicate()
    assert process.returncode == code
    assert f"error: stopped by {number.name}" in stderr.decode()
    assert set(servers) == {"target", "fused", "draft"}
    assert not [name for name, pid in servers.items() if _is_alive(pid)]


async def _until_measuring(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    seen: deque[str] = deque(maxlen=20)
    async for line in process.stderr:
        if b"tokens/s" in line:
            return
        seen.append(line.decode(errors="replace"))
    pytest.fail("the comparison ended before it measured anything:\n" + "".join(seen))


def _children(pid: int) -> dict[str, int]:
    """Return the process ids of the servers that process `pid` has started, by the names in the comparison's output."""
    roles = {"target": "target", "fused_target": "fused", "draft": "draft"}
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "--role" in words:
            name = roles[words[words.index("--role") + 1]]
            found[f"pool-{name}" if "--attach" in words else name] = int(child)
    return found


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
