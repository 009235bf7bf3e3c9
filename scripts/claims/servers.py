"""Servers for the claims: real processes, whose starts are counted; and draft models of three qualities."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.comparison.run.topologies import ATTACHED
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec.inference.errors import SpecDecError
from specdec.inference.serving.processes import ServerProcess, free_port, server_process

FIXED = ("--threads", "1")
PATIENT = ("--connect_timeout_s", "120")
GOOD, BAD, RANDOM = "good", "bad", "random"
WEIGHTS = "model.safetensors"


@dataclass
class Starts:
    """Starter of servers, which counts them, and keeps the error messages of those that failed to start."""

    tried: int = 0
    faults: tuple[str, ...] = ()

    @asynccontextmanager
    async def server(
        self, role: str, *flags: str, port: int = 0, ready_line: str | None = None
    ) -> AsyncGenerator[ServerProcess, None]:
        """Run a server until the block is left, and count its start.

        Raises:
            SpecDecError: the server did not start, or ended early.
        """
        self.tried += 1
        is_up = False
        try:
            async with server_process(role, role, *flags, port=port, ready_line=ready_line) as running:
                is_up = True
                yield running
        except SpecDecError as error:
            if not is_up:
                self.faults = (*self.faults, " ".join(str(error).split()))
            raise

    @asynccontextmanager
    async def target(self, *flags: str, port: int | None = None) -> AsyncGenerator[ServerProcess, None]:
        port = port or free_port()
        words = ("--model", str(BUNDLED_TARGET), "--port", str(port), *FIXED, "--drafting", "always", *flags)
        async with self.server("target", *words, port=port) as running:
            yield running

    @asynccontextmanager
    async def worker(self, model: Path, target: ServerProcess) -> AsyncGenerator[ServerProcess, None]:
        words = ("--model", str(model), "--attach", target.address, *FIXED)
        async with self.server("worker", *words, ready_line=ATTACHED) as running:
            yield running

    async def all_roles(self) -> None:
        """Start a target, two kinds of draft servers for it, and a server of both models at the same time; end them."""
        port, edge, fused = free_port(), free_port(), free_port()
        pair = ("--target_model", str(BUNDLED_TARGET), "--draft_model", str(BUNDLED_DRAFT), "--port", str(fused))
        draft = ("--model", str(BUNDLED_DRAFT), "--target_host", "127.0.0.1", "--port", str(port), "--serve", str(edge))
        attach = ("--model", str(BUNDLED_DRAFT), "--attach", f"127.0.0.1:{port}")
        servers = (
            self.target(port=port),
            self.server("worker", *attach, *FIXED, ready_line=ATTACHED),
            self.server("draft", *draft, *FIXED, *PATIENT, port=edge),
            self.server("fused_target", *pair, *FIXED, port=fused),
        )
        leave = asyncio.Event()
        ups = [asyncio.Event() for _ in servers]

        async def run(number: int) -> None:
            try:
                async with servers[number]:
                    ups[number].set()
                    await leave.wait()
            except SpecDecError:
                ups[number].set()  # it is counted

        tasks = [asyncio.create_task(run(number)) for number in range(len(servers))]
        for up in ups:
            await up.wait()
        leave.set()
        await asyncio.gather(*tasks)


def made_drafts(directory: Path) -> dict[str, Path]:
    """Make two draft models that suit the bundled target badly; return the directories of all three by quality.

    The keys are "good" (the bundled draft), "bad" (with changed weights) and "random".
    """
    torch.manual_seed(0)
    made = {GOOD: BUNDLED_DRAFT, BAD: directory / BAD, RANDOM: directory / RANDOM}
    for name in (BAD, RANDOM):
        shutil.copytree(BUNDLED_DRAFT, made[name])
        weights = load_file(made[name] / WEIGHTS)
        for key, each in weights.items():
            noise = torch.randn_like(each) * each.float().std().to(each.dtype)
            weights[key] = each + noise / 2 if name == BAD else noise
        save_file(weights, made[name] / WEIGHTS, metadata={"format": "pt"})
    return made


def client(*servers: ServerProcess | str) -> specdec.AsyncClient:
    """Return a client of these servers; if one is lost, it continues answers at another one."""
    addresses = (each if isinstance(each, str) else each.address for each in servers)
    return specdec.AsyncClient(",".join(addresses), connect_timeout_s=120, reconnect_timeout_s=120)
