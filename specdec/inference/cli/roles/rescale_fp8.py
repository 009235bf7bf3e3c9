"""Role rescale_fp8: makes of a public fp8 checkpoint one that Neuron devices can read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from specdec.inference.config import SERVICE_FLAGS, ObserveConfig
from specdec.inference.serving.models import Models
from specdec.inference.settings import REQUIRED, group, setting


@dataclass(frozen=True, slots=True)
class Checkpoints(Models):
    """Checkpoint to read, and checkpoint to write.

    Attributes:
        model: directory of a checkpoint in OCP's E4M3 (safetensors, with scales), or its hub id.
        output: directory to write, which takes as much room as the input; a run that was killed continues there.
    """

    SECTION: ClassVar = "checkpoints"
    REVISIONS: ClassVar = {"model": None}

    model: Path = setting(REQUIRED, "--model DIR")
    output: Path = setting(REQUIRED, "--output DIR")


@dataclass(frozen=True, slots=True)
class RescaleSettings:
    """Settings of --role rescale_fp8, which makes of a public fp8 checkpoint one that Neuron devices can read."""

    checkpoints: Checkpoints = group(Checkpoints)
    observe: ObserveConfig = group(ObserveConfig, role="rescale_fp8", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: RescaleSettings) -> int:
    """Write the new checkpoint, and print a line per file; return exit code 0.

    Ctrl-C ends this once the file that is being written is finished; a later call continues there.
    """
    from specdec.inference.backends.registry import tool

    lines = tool("rescale_fp8")(settings.checkpoints.model, settings.checkpoints.output)
    while (line := await asyncio.to_thread(next, lines, None)) is not None:
        print(line, flush=True)
    return 0
