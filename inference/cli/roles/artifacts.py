"""--role artifacts: what lies in a folder of compiled models, whether it is whole, and what of it can go."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from inference.cli import flags
from inference.cli.roles.role import Role


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("compiled models")
    text = "ls: each with all that it was compiled for; verify: read every file; clean: delete what nobody loads"
    group.add_argument("action", choices=("ls", "verify", "clean"), help=text)
    flags.add_compiled_model_path(group)
    text = "clean spares what was begun less than this ago: it may not be finished yet (%(default)s)"
    group.add_argument("--older_than_h", type=float, default=24.0, metavar="HOURS", help=text)


async def run(args: argparse.Namespace) -> int:
    """Print a report; 1 if a model is damaged, or the store lets nothing be deleted."""
    return int(not await asyncio.to_thread(_report, args.action, args.compiled_model_path, args.older_than_h))


def _report(action: str, root: Path | None, older_than_h: float) -> bool:
    from inference.backends.registry import artifact_report

    is_well = True
    for line, is_good in artifact_report(action, root, older_than_h):
        print(line)
        is_well = is_well and is_good
    return is_well


ROLE = Role("artifacts", "List, verify or clean a folder of compiled models.", add_flags, run)
