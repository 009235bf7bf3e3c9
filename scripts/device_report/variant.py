"""One server of a device's report, and the figures that the comparison measured at it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.comparison.app import samples_of
from specdec.comparison.plan.flags import parse_config
from specdec.comparison.plan.grid import WARM_UP, Sample
from specdec.comparison.plan.record import RequestRecord
from specdec.comparison.plan.slo import Slo
from specdec.comparison.report.service import Service
from specdec.inference.serving.processes import Start, free_port, server_process


@dataclass(slots=True)
class Variant:
    """One server of a device's report, and what was measured at it.

    Attributes:
        name: heading in the report.
        role: role of main.py.
        flags: flags of that role.
        artifacts: folder of its compiled models; None for the default one.
        start_s: seconds until the server was ready, with compiling; None if it did not start.
        samples: measurements, one for each kind of prompts.
    """

    name: str
    role: str
    flags: tuple[str, ...]
    artifacts: Path | None = None
    start_s: float | None = None
    samples: Sequence[Sample] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments with which main.py starts this server."""
        return ("--role", self.role, *self.flags)

    @property
    def answers(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Token ids of the answers, by the prompt's kind and number."""
        return {(it.cell.kind, record.prompt_index): record.token_ids for it in self.samples for record in it.records}

    @property
    def failures(self) -> list[RequestRecord]:
        """Records of the requests that got no answer, or not all of it."""
        return [record for sample in self.samples for record in sample.failures]

    async def measure(self, load: Sequence[str], output: Path, *, start_timeout_s: float) -> None:
        """Start the server, send it requests by the comparison, and stop it; its log is written to `output`.

        Args:
            load: the comparison's flags that say which requests are sent.
            start_timeout_s: limit in seconds of the server's start.

        Raises:
            SpecDecError: the server ended, or was not ready in time; or a prompt is too long for it.
        """
        port = free_port()
        config = parse_config([f"--endpoint={self.role}=grpc://127.0.0.1:{port}", *load])
        flags = (*self.flags, "--port", str(port))
        log, started = output / f"{self.role}.log", time.monotonic()
        async with server_process(self.name, self.role, *flags, port=port, start=Start(start_timeout_s), log_file=log):
            self.start_s = time.monotonic() - started
            found = await samples_of(config, Console(stderr=True))
        self.samples = [sample for sample in found if sample.repeat != WARM_UP]

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return all figures by kind of prompts, with the names that results.json of a comparison has for them."""
        return {sample.cell.kind: {"variant": self.name, **_figures(sample)} for sample in self.samples}


def _figures(sample: Sample) -> dict[str, Any]:
    stats = [record.stats for record in sample.records]
    drafted = sum(it.num_draft_tokens for it in stats)
    return {
        "kind": sample.cell.kind,
        **Service.of([sample], Slo()).statistics(),
        "acceptance_rate": sum(it.num_accepted_tokens for it in stats) / drafted if drafted else None,
        "errors": [record.error_message for record in sample.failures],
    }
