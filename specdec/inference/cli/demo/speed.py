"""Demo of speed, in one minute: a draft worker and a target in two processes, against the target alone.

It streams the text of a few prompts as it comes, then shows a table of what the draft gained. Runs with and without
drafts take turns on the same servers, and must give the same tokens. Prose is sampled with a seed, since a small
model's greedy prose runs in circles.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.inference.cli.prompts.output import coloured
from specdec.inference.cli.prompts.source import read_prompts
from specdec.inference.commit import Delta
from specdec.inference.config import ALWAYS, BUNDLED_PROMPTS, ConnectionConfig, usable_core_ids
from specdec.inference.observe.host_load import LoadMeter
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import Start, free_port, server_process
from specdec.inference.workers.calls.fleet import connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.results import NUM_PAIRS, Comparison, Result, span_of
from specdec.inference.workers.completion import Completer, CompletionRequest

MAX_NEW_TOKENS = 96
SEED = 1
PROSE = SamplingParams(temperature=0.8)
STRUCTURED = SamplingParams()  # greedy
console = Console(highlight=False)


async def run(start: Start) -> int:
    """Run the demo; return 0, or 1 if a run with drafts gave other tokens than one without.

    Args:
        start: start of the demo's servers, with its time limit.
    """
    prompts = read_prompts(None, BUNDLED_PROMPTS)
    cores = usable_core_ids()
    target_core, draft_core = cores[0], cores[-1]
    console.print(f"Starting a target (core {target_core}) and a draft worker (core {draft_core}), joined by gRPC ...")
    port, draft_port = free_port(), free_port()
    target_flags = ("--port", str(port), "--threads", "1", "--drafting", ALWAYS)
    draft_flags = ("--port", str(port), "--serve", str(draft_port), "--threads", "1")
    meter = LoadMeter(cores, is_whole=True)
    async with AsyncExitStack() as stack:
        for name, flags, its_port, core in (
            ("target", target_flags, port, target_core),
            ("draft", draft_flags, draft_port, draft_core),
        ):
            process = server_process(name, name, *flags, port=its_port, cores=[core], start=start)
            await stack.enter_async_context(process)
        alone, drafted = [await completer_of(stack, each) for each in (port, draft_port)]
        await complete(alone, prompts[0], STRUCTURED)  # first passes build what later ones use
        comparisons = [await _compare(prompt, drafted, alone) for prompt in prompts]
    console.print(table_of(comparisons))
    if warning := meter.read().warning:
        console.print(f"[yellow]{warning}[/yellow]\n")
    return _verdict(comparisons)


async def completer_of(stack: AsyncExitStack, port: int) -> FailoverCompleter:
    """Return an object that sends requests to the server at this port of this machine; closing `stack` closes it."""
    connection = ConnectionConfig(f"127.0.0.1:{port}")
    return FailoverCompleter(await stack.enter_async_context(connected(connection)), connection)


def sampling_of(prompt: str) -> SamplingParams:
    """Return the sampling parameters of the demo for a prompt: temperature 0.8 if it has only words, else greedy."""
    return PROSE if prompt.replace(" ", "").isalpha() else STRUCTURED


async def _compare(prompt: str, drafted: Completer, alone: Completer) -> Comparison:
    sampling = sampling_of(prompt)
    console.print(f"\n[bold]{escape(prompt)}[/bold]", end="")
    await complete(drafted, prompt, sampling, show=True)  # warms it up too
    console.print()

    async def run(is_drafted: bool) -> Result:
        return await (complete(drafted, prompt, sampling) if is_drafted else complete(alone, prompt, sampling, gamma=0))

    return await Comparison.of(run)


async def complete(
    completer: Completer, prompt: str, sampling: SamplingParams, *, gamma: int | None = None, show: bool = False
) -> Result:
    """Complete a prompt with at most `MAX_NEW_TOKENS` tokens and the demo's seed; return the result.

    Args:
        gamma: most draft tokens per pass; 0 for none; None leaves it to the server.
        show: True to print the text as it comes.
    """
    result = Result(prompt)
    request = CompletionRequest(prompt, sampling, seed=SEED, max_new_tokens=MAX_NEW_TOKENS, gamma=gamma)
    async with aclosing(completer.complete(request)) as events:
        async for event in events:
            result.record(event)
            if show and isinstance(event, Delta):
                print(coloured(event), end="", flush=True)
    return result


def table_of(comparisons: Sequence[Comparison]) -> Table:
    """Return a table of figures with a row for each prompt, and one for all prompts."""
    title = "\nSpeculative decoding against the target alone: same run, same tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("prompt", max_width=16, no_wrap=True)
    for name in ("choice", "tok/s", "accepted", "tok/pass", "speed-up", "B/tok", "exact"):
        table.add_column(name, justify="right", no_wrap=True)
    for comparison in comparisons:
        prompt = comparison.drafted[0].prompt
        choice = "greedy" if sampling_of(prompt).greedy else f"T {PROSE.temperature:g}"
        table.add_row(escape(prompt), choice, *_figures([comparison]))
    table.add_section()
    table.add_row("all", "", *_figures(comparisons), style="bold")
    return table


def _figures(comparisons: Sequence[Comparison]) -> list[str]:
    runs = [result.stats for comparison in comparisons for result in comparison.drafted]
    num_tokens = sum(stats.num_output_tokens for stats in runs)
    num_drafted = sum(stats.num_draft_tokens for stats in runs)
    rounds = zip(*(comparison.speed_ups for comparison in comparisons), strict=True)
    num_passes = sum(stats.num_verified_proposals for stats in runs)
    return [
        f"{num_tokens / sum(stats.end_to_end_s for stats in runs):.0f}",
        f"{sum(stats.num_accepted_tokens for stats in runs) / max(1, num_drafted):.2f}",
        f"{sum(stats.num_tokens_of_proposals for stats in runs) / max(1, num_passes):.2f}",
        f"{span_of([*map(statistics.geometric_mean, rounds)], '-')}x",
        f"{sum(stats.wire_bytes for stats in runs) / num_tokens:.0f}",
        "yes" if all(comparison.is_exact for comparison in comparisons) else "NO",
    ]


def _verdict(comparisons: Sequence[Comparison]) -> int:
    wrong = [comparison.drafted[0].prompt for comparison in comparisons if not comparison.is_exact]
    if wrong:
        console.print(f"[red]{len(wrong)} prompts gave other tokens than the target alone: {wrong}[/red]")
        return 1
    console.print(
        f"choice: patterns greedily, prose at temperature {PROSE.temperature:g} (T) with seed {SEED}.\n"
        "accepted: share of draft tokens. tok/pass: committed tokens per verifying\n"
        f"target pass. speed-up: least and greatest of {NUM_PAIRS} pairs of runs. B/tok: bytes on\n"
        "the wire per token. exact: every token is the target's own."
    )
    console.print(next_steps(), soft_wrap=True, markup=False)
    return 0


def next_steps() -> str:
    """Return a text with commands to try next, called in the way in which the demo was called."""
    is_installed = Path(sys.argv[0]).stem == "specdec"
    call = "specdec" if is_installed else f"{os.path.relpath(sys.executable)} -m specdec"
    return f"""
What next?
  lose one  {call} demo failover
  serve     {call} fused_target --http_port 8000
            curl http://localhost:8000/v1/completions -H "Content-Type: application/json" \\
                 -d '{{"prompt": "Once upon a time", "max_tokens": 60}}'
  compare   {call} compare
  your own  {call} doctor TARGET DRAFT"""
