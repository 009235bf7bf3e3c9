"""--role fused_client: a thin client of any of our servers."""

from __future__ import annotations

import argparse

from inference.cli import flags, settings
from inference.cli.roles.role import Role


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_connection(parser, what="host of the server", serves=False)
    flags.add_concurrency(parser)
    flags.add_speculation(parser, default=None, text=flags.GAMMA_OF_A_SERVER)
    flags.add_prompts(parser)
    flags.add_sampling(parser)


async def run(args: argparse.Namespace) -> int:
    job, connection = settings.prompt_job(args, gamma=args.gamma), settings.connection_config(args)

    from inference.cli.prompts.topologies import run_client

    return await run_client(job, connection)


ROLE = Role("fused_client", "Complete prompts at any of our servers.", add_flags, run)
