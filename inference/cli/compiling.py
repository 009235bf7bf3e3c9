"""Compiling what a role would load, instead of loading it."""

from __future__ import annotations

import asyncio
import logging
import time

from inference.config import ModelConfig
from inference.errors import ConfigError

logger = logging.getLogger(__name__)


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
