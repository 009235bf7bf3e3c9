"""The attackers' process of the hostile suite: it runs every attack in turn, and prints a JSON line for each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import suppress

from tests.suites.hostile import browsers, peers
from tests.suites.hostile.fuzz import fuzz
from tests.suites.hostile.scene import BROKEN, Recipe, Scene, Seen

NICENESS = 5
FUZZ_SHARE = 0.6
"""Least share of the attackers' time that fuzzing gets; it gets more if other attacks end early."""


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def attack(scene: Scene, seconds: float) -> None:
    """Run all attacks for `seconds`; go on until at least one fuzzed message was sent."""
    began, seen = time.monotonic(), Seen()
    patient = [asyncio.create_task(_patiently(recipe, scene, seen)) for recipe in (*peers.PATIENT, *browsers.PATIENT)]
    quick = (*peers.QUICK, *browsers.QUICK)
    for recipe in quick:
        say(recipe=recipe.__name__)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds * (1 - FUZZ_SHARE) / len(quick)):
                await _tolerant(recipe, scene, seen)
    stop = asyncio.Event()
    fuzzing = asyncio.create_task(fuzz(scene, seen, stop))
    while (time.monotonic() - began < seconds or not seen["messages"]) and not fuzzing.done():
        say(recipe="fuzz", messages=seen["messages"])
        await asyncio.sleep(1)
    stop.set()
    await fuzzing
    for task in patient:
        task.cancel()
    ends = await asyncio.gather(*patient, return_exceptions=True)
    if failures := [end for end in ends if isinstance(end, Exception)]:
        raise ExceptionGroup("recipes that did not go on", failures)
    say(seen=dict(sorted(seen.items())))


async def _patiently(recipe: Recipe, scene: Scene, seen: Seen) -> None:
    while True:
        await _tolerant(recipe, scene, seen)
        await asyncio.sleep(0.2)


async def _tolerant(recipe: Recipe, scene: Scene, seen: Seen) -> None:
    """Run an attack; if an error of its own calls ends it, count that in `seen`: only effects on others matter."""
    try:
        await recipe(scene, seen)
    except (OSError, *BROKEN) as exc:
        seen[f"{recipe.__name__} {type(exc).__name__}"] += 1
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(attack(Scene(**json.loads(sys.argv[1])), float(sys.argv[2])))
