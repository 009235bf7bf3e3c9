"""--role compile: compile models ahead of time for the servers that will load them, and end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time

from inference.cli import flags, settings
from inference.cli.roles.role import Role
from inference.config import ModelConfig, usable_cores
from inference.errors import ConfigError

logger = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_compiled_models(parser)
    flags.add_verification(parser)


async def run(args: argparse.Namespace) -> int:
    """Compile one model, or both: into one graph if the method is a fused one, else each for itself."""
    target, draft = args.target_model, args.draft_model
    method = settings.method_of_pair(args, has_draft=target is not None and draft is not None)
    ours = settings.neuron_options(args, gamma=args.gamma, method=method)
    drafts = settings.neuron_options(args, method=method, tp_degree=args.draft_tp_degree)
    ours_and_drafts = [
        None if path is None else settings.model_config(args, path, num_threads=usable_cores(), neuron=neuron)
        for path, neuron in ((target, ours), (draft, drafts))
    ]
    return await compile_ahead(*ours_and_drafts)


async def compile_ahead(target: ModelConfig | None, draft: ModelConfig | None) -> int:
    """Compile what is not compiled yet, a pair or a model alone; returns the exit code.

    Raises:
        ConfigError: there is no model, a backend compiles nothing, or a model cannot be used.
    """
    if target is None and draft is None:
        raise ConfigError("nothing to compile: name --target_model, --draft_model or both")
    from inference.backends.registry import compile_models

    started = time.monotonic()
    await asyncio.to_thread(compile_models, target, draft)
    logger.info("everything is compiled, after %.0f s", time.monotonic() - started)
    return 0


ROLE = Role("compile", "Compile models ahead of time for backend neuron.", add_flags, run)
