"""What a role leaves behind when it ends, if the flags ask for it: a profile, a trace."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference.engine.engine import Engine
from inference.profile import Profile
from inference.trace import Trace

logger = logging.getLogger(__name__)


@contextmanager
def profiled(args: argparse.Namespace) -> Generator[Profile | None, None, None]:
    """A profile that is written when the block ends well; None without --profile."""
    if not args.profile:
        yield None
        return
    profile = Profile(args.role)
    yield profile
    report_profile(profile)


def report_profile(profile: Profile) -> None:
    """Write the profile's files into the current directory, and say where they are."""
    logger.info("profile: %s", " and ".join(str(path) for path in profile.write(Path())))


@contextmanager
def traced(args: argparse.Namespace, engine: Engine[Any, Any, Any]) -> Generator[None, None, None]:
    """Trace the engine's steps while the block runs; nothing without --trace."""
    if args.trace is None:
        yield
        return
    engine.trace = Trace(args.role)
    try:
        yield
    finally:
        engine.trace.write(args.trace)
        logger.info("trace: %s", args.trace)
