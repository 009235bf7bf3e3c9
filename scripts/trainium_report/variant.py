"""One way to serve the target, and what came of the load there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from grpc_comm.channel import open_channel
from inference.cli.prompts.results import Result
from inference.serving.processes import free_port, server_process
from inference.workers.remote import RemoteCompleter
from scripts.trainium_report.load import Load, run


@dataclass(slots=True)
class Variant:
    """A server of one role.

    Attributes:
        name: for people.
        flags: of its role.
        artifacts: folder of its compiled models; None is the default one.
        start_s: until it served, compiling included.
        load_s: of all requests together.
    """

    name: str
    role: str
    flags: tuple[str, ...]
    artifacts: Path | None = None
    start_s: float | None = None
    load_s: float = 0.0
    results: list[Result] = field(default_factory=list)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of main.py."""
        return ("--role", self.role, *self.flags)


async def measure(variant: Variant, load: Load, output: Path, *, start_timeout_s: float) -> None:
    """Start its server, run the load, stop it; its log stays in `output`.

    Raises:
        UnavailableError: the server ended, or did not serve in time.
    """
    port, started = free_port(), time.monotonic()
    flags = (*variant.flags, "--port", str(port))
    log = output / f"{variant.role}.log"
    async with server_process(
        variant.name, variant.role, *flags, port=port, ready_timeout_s=start_timeout_s, log_file=log
    ) as server:
        variant.start_s = time.monotonic() - started
        async with open_channel(server.address) as channel:
            began = time.monotonic()
            completer = RemoteCompleter(channel, server.address, deadline_s=load.deadline_s)
            variant.results = await run(load, completer)
            variant.load_s = time.monotonic() - began
