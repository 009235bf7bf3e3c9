"""--role verify_target and verify_draft: one model alone, no server, each token as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from inference.cli import flags, settings
from inference.cli.roles.compile import compile_ahead
from inference.cli.roles.role import Role
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, usable_cores


def flags_of(default: Path, what: str) -> Callable[[argparse.ArgumentParser], None]:
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, default=default, what=what)
        flags.add_prompts(parser)
        flags.add_sampling(parser)
        flags.add_trace(parser)

    return add_flags


async def run(args: argparse.Namespace) -> int:
    neuron = settings.neuron_options(args)
    model = settings.model_config(args, args.model, num_threads=usable_cores(), neuron=neuron)
    if args.compile == "only":
        return await compile_ahead(model, None)
    job = settings.prompt_job(args, trace=args.trace)

    from inference.cli.prompts.topologies import run_alone

    return await run_alone(job, model)


TARGET = Role("verify_target", "Run the target alone, here.", flags_of(BUNDLED_TARGET, "target"), run)
DRAFT = Role("verify_draft", "Run the draft alone, here.", flags_of(BUNDLED_DRAFT, "draft"), run)
