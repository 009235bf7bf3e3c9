"""This project's target with vLLM as its engine, in vLLM's environment: alone, and with draft workers.

Each target serves HTTP itself, and has draft workers of its own, which reach it through a proxy that adds a round trip.
The first answer after a change of the round trip does not count, since workers measure the new one meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.peers.child import Generate, Loaded, Setup, answer
from benchmarks.peers.environment import UnavailableError
from benchmarks.peers.race import PLAIN
from benchmarks.peers.server import Server
from benchmarks.peers.vllm import ALIKE, EXTRA, START_S, engine_flags, generate, prepare, refuse, rest
from specdec.comparison.run.proxy import DelayProxy, LinkConditions, delay_proxy, precise_event_loop
from specdec.comparison.run.topologies import ATTACHED
from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port

MAIN = (str(ROOT / "main.py"), "--role")
SHOWN = {"stream_options": {"include_speculation": True}}
"""Request fields by which this project's HTTP server returns token ids."""
Result = TypeVar("Result")


class Way(NamedTuple):
    """Settings of one variant: vLLM's flags, draft workers, prompt lookup, and the workers' round trip in ms.

    Variants that differ only in the round trip share a server.
    """

    flags: tuple[str, ...]
    num_workers: int = 0
    looks_up: bool = True
    rtt_ms: int = 0


_WITH_WORKERS = {
    f"{number} worker{'s' if number > 1 else ''}, {rtt_ms} ms": Way(ALIKE, number, rtt_ms=rtt_ms)
    for number in (1, 2)
    for rtt_ms in (0, 10, 50)
}
USUAL = {PLAIN: Way(ALIKE, looks_up=False), "lookup": Way(ALIKE), **_WITH_WORKERS}
"""Settings of the variants of `make bench-vllm`, by the variant's name."""
WAYS = {
    **USUAL,
    **{name: Way(flags) for name, flags in EXTRA.items() if name != "asynchronous"},
    "graphs, 1 worker": Way(EXTRA["graphs"], 1),
}


class Network:
    """Network proxies between draft workers and targets; they run in a thread of their own."""

    def __init__(self) -> None:
        self._loop = precise_event_loop()
        self._stack = AsyncExitStack()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def link(self, port: int) -> DelayProxy:
        """Return a new proxy that forwards to a port of this machine."""
        return self._run(self._stack.enter_async_context(delay_proxy(port)))

    def set_rtt(self, proxy: DelayProxy, rtt_ms: int) -> bool:
        """Wait until vLLM's processes have stopped polling, then set a proxy's round trip in milliseconds.

        Return whether the round trip has changed.
        """
        rest()
        wanted = LinkConditions(rtt_ms / 1e3)
        is_new, proxy.conditions = proxy.conditions != wanted, wanted
        return is_new

    def _run(self, what: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()


def load(setup: Setup) -> Loaded:
    """Start targets and draft workers for the wanted variants; those that differ only in the round trip share them."""
    prepare(setup)
    chosen = {name: way for name, way in WAYS.items() if name in (setup.variants or USUAL)}
    network, variants, before = Network(), {}, {}
    targets = {served: _target(setup, *served) for served in {way[:3]: None for way in chosen.values()}}
    for served, (target, port) in targets.items():
        proxy = network.link(port)
        try:
            target.wait(partial(target.answers, "/v1/models"), START_S)
            for _ in range(served[1]):
                attach(setup, [proxy.address])
            ask: Generate = partial(generate, target, SHOWN)
        except UnavailableError as error:
            ask = partial(refuse, str(error))
        for name, way in chosen.items():
            if way[:3] == served:
                variants[name], before[name] = ask, partial(network.set_rtt, proxy, way.rtt_ms)
    return Loaded(variants, {}, before)


def _target(setup: Setup, flags: Sequence[str], num_workers: int, looks_up: bool) -> tuple[Server, int]:
    """Start a target of this project with vLLM as its engine; return it, and its port for draft workers.

    `flags` are those of vLLM; `looks_up` is whether it drafts by prompt lookup, too. `num_workers` has no effect here:
    the caller attaches the workers.
    """
    own = ["--engine=vllm", f"--model={setup.target}", f"--port={(port := free_port())}", "--grace_s=1"]
    own += [f"--http_port={(http_port := free_port())}", "--stream_chunk=pass", *([] if looks_up else ["--no-lookup"])]
    own += ["--", *engine_flags(setup), *flags]
    return Server([sys.executable, *MAIN, "target", *own], http_port), port


def attach(setup: Setup, addresses: Sequence[str]) -> None:
    """Start a draft worker for the targets at these addresses, and wait until it has attached to all of them."""
    device = ["--backend=torch", "--device=cuda"] if torch.cuda.is_available() else ["--threads=1"]
    own = [f"--model={setup.draft}", f"--tokenizer={setup.target}", f"--batch={setup.num_streams}"]
    command = [sys.executable, *MAIN, "draft", *own, f"--attach={','.join(addresses)}", "--no-prefix_caching", *device]
    worker = Server(command, 0)
    worker.wait(lambda: worker.log().count(ATTACHED) >= len(addresses), START_S)


if __name__ == "__main__":
    answer(load)
