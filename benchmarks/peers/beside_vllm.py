"""Stock vLLM's server with this project's configuration file, beside a draft pool with none, one or two draft workers.

It is called over HTTP. Each variant has a server and a pool of its own; a worker drafts for all variants that have it,
since variants take turns.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from functools import partial

from benchmarks.peers.child import Generate, Loaded, Setup, answer
from benchmarks.peers.environment import UnavailableError
from benchmarks.peers.over_vllm import MAIN, Way, attach
from benchmarks.peers.race import PLAIN
from benchmarks.peers.server import Server
from benchmarks.peers.vllm import ALIKE, IDS, START_S, prepare, refuse, rest, started, usable
from specdec.inference.serving.processes import free_port

MOST_WORKERS = 2
READY = '"pid"'
"""Text in the line that a server started with `--ready_json` prints once it is ready."""
WAYS = {
    ", ".join(filter(None, (base, f"{number} worker{'s' * (number > 1)}" * bool(number)))) or PLAIN: Way(flags, number)
    for base, flags in (("", ALIKE), ("defaults", ()))
    for number in range(MOST_WORKERS + 1)
}
"""Variants by name: none, one and two draft workers, with the same scheduling as `plain` and with vLLM's defaults."""


def load(setup: Setup) -> Loaded:
    """Start vLLM's server and a draft pool for each wanted variant, then the draft workers; return the variants."""
    prepare(setup)
    chosen = {name: way for name, way in WAYS.items() if name in (setup.variants or WAYS)}
    sites = {name: _site(setup, name, way) for name, way in chosen.items()}
    variants: dict[str, Generate] = {}
    for name, (server, pool) in sites.items():
        variants[name] = usable(server, IDS)
        try:
            pool.wait(partial(_is_ready, pool), START_S)
        except UnavailableError as error:
            variants[name] = partial(refuse, str(error))
    for number in range(MOST_WORKERS):
        pools = [f"127.0.0.1:{sites[name][1].port}" for name, way in chosen.items() if way.num_workers > number]
        if pools:
            attach(setup, pools)
    return Loaded(variants, {}, dict.fromkeys(variants, rest))


def _site(setup: Setup, name: str, way: Way) -> tuple[Server, Server]:
    """Start vLLM's server with this project's configuration file, and a pool for draft workers; return both."""
    mailbox = f"--mailbox={tempfile.mkdtemp(prefix='specdec-')}"
    command = [sys.executable, *MAIN, "vllm-config", "--flags", mailbox]
    ours = shlex.split(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    pool = [sys.executable, *MAIN, "pool", mailbox, f"--port={(port := free_port())}", "--ready_json", "--grace_s=1"]
    return started(setup, (*way.flags, *ours), name), Server(pool, port)


def _is_ready(pool: Server) -> bool:
    return READY in pool.log()


if __name__ == "__main__":
    answer(load)
