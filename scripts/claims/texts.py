"""Claims on texts: no draft changes a text, nor does the loss of a server; and servers start without failures."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import specdec
from benchmarks.decoding import read_prompts
from scripts.claims import plan
from scripts.claims.servers import GOOD, Starts, client, made_drafts
from scripts.claims.verdict import Verdict
from specdec.inference.config import BUNDLED_DRAFT, ROOT
from specdec.inference.request import Schedule
from specdec.inference.serving.processes import free_port
from specdec.inference.workers.completing.results import Result

BEGUN = 4
"""Number of tokens of an answer after which a target is killed."""
LOOKUP = "lookup"
HEADER = ["dtype", "temperature", "drafts", "texts changed", "by a draft model", "by lookup", "accepted"]


def prompts(count: int) -> list[str]:
    """Return `count` different prompts, from all files in prompts/ in turn."""
    files = [read_prompts(file, count) for file in sorted((ROOT / "prompts").glob("*.txt"))]
    in_turn = (line for lines in itertools.zip_longest(*files) for line in lines if line is not None)
    return list(dict.fromkeys(in_turn))[:count]


def digest(results: Sequence[Result]) -> list[str]:
    return [hashlib.sha256(repr(each.token_ids).encode()).hexdigest()[:16] for each in results]


def num_changed(results: Sequence[Result], right: Sequence[Result]) -> int:
    return sum(one != other for one, other in zip(digest(results), digest(right), strict=True))


def _parameters(size: plan.Size, temperature: float) -> dict[str, Any]:
    return {"max_new_tokens": size.num_tokens, "temperature": temperature, "seed": plan.SEED, "ignore_eos": True}


async def drafts_change_no_text(size: plan.Size, starts: Starts, directory: Path) -> Verdict:
    """Compare texts with drafts to the target's own; return the verdict.

    The drafts are those of models of several qualities, of prompt lookup, and of a worker that is killed.
    """
    models, rows = made_drafts(directory), [HEADER]
    for dtype in plan.DTYPES:
        async with starts.target("--backend", "torch", "--dtype", dtype) as target, client(target) as asking:
            right, asked = {}, {}
            for each in plan.TEMPERATURES:
                asked[each] = _parameters(size, each)
                right[each] = await asking.generate(prompts(size.num_prompts), gamma=0, **asked[each])
                found = await asking.generate(prompts(size.num_prompts), **asked[each])
                rows.append(_row(dtype, each, LOOKUP, found, right[each]))
            for name, model in models.items():
                async with starts.worker(model, target):
                    for each in plan.TEMPERATURES:
                        how: Any = (
                            {"schedule": Schedule.SYNC} if name != GOOD else {}
                        )  # else few of a wrong draft's arrive
                        found = await asking.generate(prompts(size.num_prompts), **asked[each], **how)
                        rows.append(_row(dtype, each, name, found, right[each]))
            for each in plan.TEMPERATURES:
                async with starts.worker(BUNDLED_DRAFT, target) as worker:
                    found = await _lost(asking, worker.process.kill, size, asked[each])
                rows.append(_row(dtype, each, "good, killed", found, right[each]))
    changed, texts = sum(int(row[3]) for row in rows[1:]), size.num_prompts * len(rows[1:])
    undrafted = [" ".join(row[:3]) for row in rows[1:] if row[5 if row[2] == LOOKUP else 4] == "0"]
    measured = "; no draft token: ".join([f"{changed} of {texts} texts changed", *undrafted])
    return Verdict(
        f"No draft changes a text (at most {plan.MOST_TEXTS_CHANGED})",
        measured,
        changed <= plan.MOST_TEXTS_CHANGED and not undrafted,
        rows,
    )


def _row(dtype: str, temperature: float, name: str, found: Sequence[Result], right: Sequence[Result]) -> list[str]:
    total = sum((each.stats.by_source for each in found), Counter())
    drafted, looked_up = (total[source, True] + total[source, False] for source in ("draft", LOOKUP))
    counts = (num_changed(found, right), drafted, looked_up, total["draft", True] + total[LOOKUP, True])
    return [dtype, f"{temperature:g}", name, *map(str, counts)]


async def _lost(asking: specdec.AsyncClient, kill: Callable[[], None], size: plan.Size, asked: Any) -> list[Result]:
    """Ask all prompts, and call `kill` once an answer to a further one comes with draft tokens of a model.

    Return the answers to all prompts.
    """
    answers = asyncio.create_task(asking.generate(prompts(size.num_prompts), **asked))
    async for part in asking.stream(prompts(1)[0], **asked):
        if part.num_draft_tokens > part.own.num_tokens:
            break
    kill()
    return await answers


async def failover_changes_no_text(size: plan.Size, starts: Starts) -> Verdict:
    """Kill a target during answers, start another one, and compare the clients' answers; return the verdict."""
    rows = [["target killed", "temperature", "answers", "in flight", "changed", "SHA-256 of all"]]
    for number in range(size.num_failovers):
        temperature = plan.TEMPERATURES[number % len(plan.TEMPERATURES)]
        right, found, in_flight = await _failover(size, starts, _parameters(size, temperature))
        total = hashlib.sha256("".join(digest(found)).encode()).hexdigest()[:16]
        counts = (len(found), in_flight, num_changed(found, right))
        rows.append([str(number + 1), f"{temperature:g}", *map(str, counts), total])
    in_flight, changed = (sum(int(row[column]) for row in rows[1:]) for column in (3, 4))
    return Verdict(
        f"A killed target changes no text (at most {plan.MOST_TEXTS_CHANGED})",
        f"{changed} of {in_flight} answers in flight changed, {size.num_failovers} targets killed",
        changed <= plan.MOST_TEXTS_CHANGED and in_flight > 0,
        rows,
    )


async def _failover(size: plan.Size, starts: Starts, asked: Any) -> tuple[list[Result], list[Result], int]:
    """Ask the same prompts without and with the loss of their target.

    Return the answers without it, those with it, and how many of the latter were in progress at that time.
    """
    some, other = prompts(min(4, size.num_prompts)), free_port()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(starts.target())
        asking = await stack.enter_async_context(client(first, f"127.0.0.1:{other}"))
        right = await asking.generate(some, **asked)
        answers = [asyncio.create_task(asking.generate(each, **asked)) for each in some]
        count = 0
        async for part in asking.stream(some[0], **asked):
            count += len(part.token_ids)
            if count >= BEGUN:
                break
        first.process.kill()
        in_flight = sum(not each.done() for each in answers)
        await stack.enter_async_context(starts.target(port=other))
        found = [result for each in answers for result in await each]
    return right, found, in_flight


async def starts_succeed(size: plan.Size, starts: Starts) -> Verdict:
    """Start servers of all roles at once, several times; return the verdict on all starts of the run so far."""
    for _ in range(size.num_starts):
        await starts.all_roles()
    return Verdict(
        f"Servers start (at most {plan.MOST_FAILED_STARTS} fail)",
        f"{len(starts.faults)} of {starts.tried} starts failed" + "".join(f"; {fault}" for fault in starts.faults),
        len(starts.faults) <= plan.MOST_FAILED_STARTS,
    )
