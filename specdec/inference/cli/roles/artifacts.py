"""Role artifacts: lists, verifies or cleans a folder of compiled models, or checks that a model is compiled there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from specdec.inference.config import SERVICE_FLAGS, NeuronOptions, ObserveConfig
from specdec.inference.settings import REQUIRED, group, same, setting

SECTION = "compiled models"


@dataclass(frozen=True, slots=True)
class ArtifactSettings:
    """Settings of --role artifacts, which lists, verifies or cleans a folder of compiled models.

    Attributes:
        action: ls: list each model with the settings it was compiled for; verify: read every file; clean: delete
            models that no process can load; ready: fail unless a model is there that the installed versions compiled.
        older_than_h: clean spares folders that were begun less than this ago: they may not be finished yet.
    """

    action: str = setting(REQUIRED, "action", choices=("ls", "verify", "clean", "ready"), section=SECTION)
    root: Path | None = same(NeuronOptions, "artifacts", section=SECTION)
    older_than_h: float = setting(24.0, "--older_than_h HOURS", section=SECTION)
    observe: ObserveConfig = group(ObserveConfig, role="artifacts", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: ArtifactSettings) -> int:
    """Do what the settings ask for with a folder of compiled models, and print a line for each of them.

    Return 1 if a model is damaged, the folder does not allow deletion, or none is ready where one is asked for, else 0.
    """
    return int(not await asyncio.to_thread(_report, settings.action, settings.root, settings.older_than_h))


def _report(action: str, root: Path | None, older_than_h: float) -> bool:
    from specdec.inference.backends.registry import tool

    is_well = True
    for line, is_good in tool("artifacts")(action, root, older_than_h):
        print(line)
        is_well = is_well and is_good
    return is_well
