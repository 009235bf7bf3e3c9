"""Entry point: starts servers, measures each way to serve under all conditions, writes the report, ends the servers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from rich.console import Console

from specdec.comparison.plan.config import ComparisonConfig
from specdec.comparison.plan.flags import parse_config
from specdec.comparison.plan.grid import Sample, walk
from specdec.comparison.report.diff import diff
from specdec.comparison.report.files import in_full, prepare_directory, write_report
from specdec.comparison.report.findings import Findings, find, json_of
from specdec.comparison.report.markdown import page_part, write_part
from specdec.comparison.report.table import load_table, print_tables
from specdec.comparison.run import law
from specdec.comparison.run.load import require_clients
from specdec.comparison.run.measurement import measure
from specdec.comparison.run.progress import Progress
from specdec.comparison.run.proxy import precise_event_loop
from specdec.comparison.run.topologies import compile_models, deployment
from specdec.comparison.study.capacity import Capacities, conduct_capacity
from specdec.comparison.study.capacity_report import json_of as json_of_capacities
from specdec.comparison.study.capacity_report import text_of, write_capacities
from specdec.comparison.study.flags import parse_study
from specdec.comparison.study.laboratory import conduct_study
from specdec.comparison.study.report import json_of as json_of_study
from specdec.comparison.study.report import write_study
from specdec.inference.errors import ConfigError, SpecDecError
from specdec.inference.observe.host_load import LoadMeter, busy_at_start

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BUSY = 3
LOG_WIDTH = 132
"""Characters per line if stderr is not a terminal."""


Command = Callable[[Sequence[str]], int]
"""Function that runs a command with the arguments after its name, and returns the exit code."""


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, by default the comparison.

    Returns:
        0: success. 1: a server or a request failed (failed requests of an open loop are only counted), topologies
        returned different tokens, `law` found texts that do not follow the reported probabilities, or `diff` found
        something slower. 2: wrong flags or files.
        3: a study gave no advice, because the machine was busy. 128 + n: signal n.
    """
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        return compare(arguments) if command is None else command(arguments[1:])
    except (SpecDecError, _InterruptedError) as exc:
        return _fail(exc)


def compare(arguments: Sequence[str]) -> int:
    """Run the comparison that the arguments describe; return the exit code (see `main`)."""
    config, console = parse_config(arguments), _console()
    if config.backend.compile_policy == "only":
        _run(config, compile_models(config))
        return 0
    _prepare(config)
    if config.page:
        page_part(config.page)  # raises before anything is measured
    if config.capacity is not None:
        return _report_capacities(_run(config, conduct_capacity(config, console)))
    return _report(_run(config, _compare(config, console)), console)


def study(arguments: Sequence[str]) -> int:
    """Run the study that the arguments describe, a search for the best way to serve; return the exit code (see `main`).

    A way to serve is a topology (place of draft and target) with a draft model and a number of draft tokens.
    """
    config = parse_study(arguments)
    _prepare(config.comparison)
    done = _run(config.comparison, conduct_study(config, _console()))
    output = in_full(done.config, "study.json", results := json_of_study(done), partial(write_study, done))
    for sentence in done.sentences:
        print(f"- {sentence}", file=sys.stderr)
    service = "none" if done.is_withheld else output / "service.toml"
    print(f"report: {output / 'study.html'}, service: {service}", file=sys.stderr)
    print(json.dumps(results, separators=(",", ":")), flush=True)
    if done.differences:
        return EXIT_FAILED
    return EXIT_BUSY if done.is_withheld else 0


def _prepare(config: ComparisonConfig) -> None:
    """Raise ConfigError, before any server starts, if a Python package is missing or the output cannot be written."""
    require_clients(config)
    prepare_directory(config.output)


def _console() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else LOG_WIDTH)


class _InterruptedError(Exception):
    """Interruption by Ctrl-C or SIGTERM, raised after every process has been stopped."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}; no report was written")
        self.number = number


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    if isinstance(error, _InterruptedError):
        return 128 + error.number
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def _run(config: ComparisonConfig, comparison: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=loop_for(config)) as runner:
        return runner.run(_until_signal(comparison))


def loop_for(config: ComparisonConfig) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the function that makes the event loop of the comparison.

    The loop has precise timers, but uses select(), which takes too few sockets for many streams to endpoints (servers
    that run already). If there are endpoints, the loop is therefore asyncio's usual one.
    """
    return asyncio.new_event_loop if config.endpoints else precise_event_loop


async def _until_signal(comparison: Coroutine[Any, Any, T]) -> T:
    """Run the comparison, and return its result.

    The first SIGINT or SIGTERM cancels the comparison; `_InterruptedError` is raised after it has stopped its servers.
    """
    task = asyncio.create_task(comparison)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:  # a second signal must not interrupt the shutdown
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except (asyncio.CancelledError, SpecDecError) as exc:
        if received:  # the servers got Ctrl-C too, and may have ended first
            raise _InterruptedError(received[0]) from exc
        raise


async def _compare(config: ComparisonConfig, console: Console) -> Findings:
    started, meter = time.monotonic(), LoadMeter(config.usable_cores, is_whole=not config.endpoints)
    samples = await samples_of(config, console)
    return find(config, samples, time.monotonic() - started, meter.read())


async def samples_of(config: ComparisonConfig, console: Console) -> list[Sample]:
    """Start a comparison's servers, measure every way to serve under all conditions, and stop the servers.

    Returns:
        One sample for each run of each measurement, warm-up included, with the records of the run's requests.

    Raises:
        ConfigError: a prompt is too long for a server, or a file with certificates or a token cannot be used.
        SpecDecError: a server ended or cannot be reached, or one that was started here answered no request of a run.
    """
    samples: list[Sample] = []
    with Progress(console, sum(1 for _ in walk(config))) as progress:
        if busy := await busy_at_start(config.usable_cores):
            progress.note(f"{busy} All takes longer now, and figures of speed mean little.")
        for part in config.parts:
            progress.phase(f"starting servers: {'; '.join(map(str, part.machines)) or 'none'}")
            async with deployment(part, progress.note) as servers:
                samples += await measure(part, servers, progress, samples)
                progress.phase("stopping servers")
    return samples


def _report(findings: Findings, console: Console) -> int:
    if findings.config.page:  # first, since pictures take a while
        write_part(findings.config.page, load_table(findings))
    output = in_full(findings.config, "results.json", results := json_of(findings), partial(write_report, findings))
    del results["requests"]
    print_tables(console, findings)
    for difference in findings.agreement.differences:
        print(f"error: {difference}", file=sys.stderr)
    for difference in findings.agreement.near_ties:
        print(f"near-tie: {difference}", file=sys.stderr)
    print(f"report: {output / 'report.html'}", file=sys.stderr)
    print(json.dumps(results, separators=(",", ":")), flush=True)
    if findings.num_failed:
        print(f"error: {findings.num_failed} requests failed; see the report", file=sys.stderr)
    return 0 if findings.agreement.holds and not findings.num_failed else EXIT_FAILED


def _report_capacities(found: Capacities) -> int:
    output = in_full(
        found.config, "capacity.json", results := json_of_capacities(found), partial(write_capacities, found)
    )
    print(f"\n{text_of(found)}\nreport: {output / 'capacity.md'}", file=sys.stderr)
    for difference in found.differences:
        print(f"error: {difference}", file=sys.stderr)
    print(json.dumps(results, separators=(",", ":")), flush=True)
    return EXIT_FAILED if found.differences else 0


COMMANDS: dict[str, Command] = {"diff": diff, "law": law.main, "study": study}
"""Functions that run the commands `compare_architectures.py NAME ...`, by name; without a name the comparison runs."""
