"""Role compile: compile models ahead of time for the servers that will load them, and end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time

from inference.backends.registry import compile_models
from inference.config import ModelConfig
from inference.errors import ConfigError

logger = logging.getLogger(__name__)


async def run_compile(args: argparse.Namespace, target: ModelConfig | None, draft: ModelConfig | None) -> int:
    """Compile one model, or both: into one graph if the method is a fused one, else each for itself."""
    if target is None and draft is None:
        raise ConfigError("nothing to compile: name --target_model, --draft_model or both")
    started = time.monotonic()
    await asyncio.to_thread(compile_models, target, draft)
    logger.info("compiled for %s in %.0f s", args.backend, time.monotonic() - started)
    return 0
