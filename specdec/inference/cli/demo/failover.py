"""Demo of failover: the server of a streaming answer is killed, and another server continues with the same tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing

from specdec.inference.cli.demo.speed import PROSE, SEED, console
from specdec.inference.cli.prompts.output import coloured
from specdec.inference.commit import Delta
from specdec.inference.config import ConnectionConfig
from specdec.inference.serving.processes import ServerProcess, Start, free_port, server_process
from specdec.inference.workers.calls.fleet import Fleet, connected
from specdec.inference.workers.completing.failover import FailoverCompleter
from specdec.inference.workers.completing.results import Result
from specdec.inference.workers.completion import CompletionRequest

PROMPT = "The captain stood upon the deck and looked"
MAX_NEW_TOKENS = 400
TOKENS_BEFORE_LOSS = 80


class Loss:
    """Loss of the server that answers the demo's only request.

    Args:
        fleet: servers of the demo.
        servers: processes of these servers, by HOST:PORT.

    Attributes:
        at: monotonic time in seconds at which the server was killed; None before.
    """

    def __init__(self, fleet: Fleet, servers: Mapping[str, ServerProcess]) -> None:
        self._fleet = fleet
        self._servers = servers
        self.at: float | None = None

    async def happen(self) -> None:
        """Kill the server that answers now, as `kill -9` does."""
        (address,) = (replica.address for replica in self._fleet.replicas if replica.num_leases)
        server = self._servers[address]
        server.process.kill()
        self.at = time.monotonic()
        await server.process.wait()
        console.print(f"\n[red]--- kill -9: the server at {address} is gone[/red]")


async def run(start: Start) -> int:
    """Run the demo; return 0 if an answer whose server was killed has the same tokens as an undisturbed one, else 1.

    Args:
        start: start of the demo's servers, with its time limit.
    """
    console.print("Starting two servers, each with target and draft ...")
    async with AsyncExitStack() as stack:
        servers = {}
        for port in (free_port(), free_port()):
            flags = ("--port", str(port), "--threads", "1")
            process = server_process("server", "fused_target", *flags, port=port, start=start)
            server = await stack.enter_async_context(process)
            servers[server.address] = server
        connection = ConnectionConfig(",".join(servers))
        fleet = await stack.enter_async_context(connected(connection))
        completer = FailoverCompleter(fleet, connection)
        expected = await _answer(completer)
        console.print(f"\n[bold]{PROMPT}[/bold]", end="")
        loss = Loss(fleet, servers)
        result = await _answer(completer, loss)
    return _verdict(result, expected, loss)


async def _answer(completer: FailoverCompleter, loss: Loss | None = None) -> Result:
    """Ask for the demo's answer and return it; with `loss`, print it meanwhile, and kill the server that gives it."""
    result = Result(PROMPT)
    request = CompletionRequest(PROMPT, PROSE, seed=SEED, max_new_tokens=MAX_NEW_TOKENS)
    async with aclosing(completer.complete(request)) as events:
        async for event in events:
            result.record(event)
            if loss is not None and isinstance(event, Delta):
                print(coloured(event), end="", flush=True)
                if loss.at is None and len(result.token_ids) >= TOKENS_BEFORE_LOSS:
                    await loss.happen()
    return result


def _verdict(result: Result, expected: Result, loss: Loss) -> int:
    times = [at for at, _ in result.stats.arrivals]
    gap_s = max((end - start for start, end in itertools.pairwise(times) if end > (loss.at or 0.0)), default=0.0)
    is_same = loss.at is not None and result.token_ids == expected.token_ids
    what = "same tokens as without the loss" if is_same else "[red]OTHER TOKENS than without the loss[/red]"
    num_tokens = len(result.token_ids)
    console.print(f"\n\nThe other server went on after {gap_s:.1f} s: {num_tokens} tokens, {what}.", soft_wrap=True)
    return int(not is_same)
