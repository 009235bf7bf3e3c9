"""--role rescale_fp8: a public fp8 checkpoint made into one that Neuron can read."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from inference.cli.roles.role import Role


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    text = "directory of a checkpoint in OCP's E4M3 (safetensors, with scales), or its hub id"
    group.add_argument("--model", type=Path, required=True, metavar="DIR", help=text)
    text = "directory to write: as large again. A run that was killed goes on there"
    group.add_argument("--output", type=Path, required=True, metavar="DIR", help=text)


async def run(args: argparse.Namespace) -> int:
    """Print a line per file. Ctrl-C ends it behind the file that is being written."""
    from inference.backends.registry import rescale_fp8

    lines = rescale_fp8(args.model, args.output)
    while (line := await asyncio.to_thread(next, lines, None)) is not None:
        print(line, flush=True)
    return 0


ROLE = Role("rescale_fp8", "Make a public fp8 checkpoint one for Neuron.", add_flags, run)
