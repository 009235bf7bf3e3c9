"""The roles of main.py: which flags each takes, and what it runs. Only a role that needs a model imports one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.cli import flags
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ModelConfig, ServerConfig, usable_cores

Run = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]


@dataclass(frozen=True, slots=True)
class Role:
    """One value of --role."""

    name: str
    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Run

    def parser(self) -> argparse.ArgumentParser:
        """A parser of this role's flags alone."""
        parser = argparse.ArgumentParser(
            prog=f"main.py --role {self.name}", description=self.summary, allow_abbrev=False
        )
        self.add_flags(parser)
        flags.add_logging(parser)
        return parser


def model_config(args: argparse.Namespace, path: Path, *, num_threads: int) -> ModelConfig:
    """What the flags say of a model; `num_threads` is used unless they name a number."""
    return ModelConfig(
        path=path,
        backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        sequence_length=args.sequence_length,
        num_slots=args.batch,
        num_threads=args.threads or num_threads,
    )


def _target_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, default=BUNDLED_TARGET, what="target")
    flags.add_listen(parser)


async def _target(args: argparse.Namespace) -> int:
    from inference.cli.serve import serve_target

    server = ServerConfig(args.host, args.port, args.max_waiting, args.idle_timeout_s, args.grace_s)
    # On loopback the draft runs beside it; two busy processes on one core slow each other down many times over.
    num_threads = max(1, usable_cores() - 1) if server.on_loopback else usable_cores()
    return await serve_target(model_config(args, args.model, num_threads=num_threads), server)


def _draft_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, default=BUNDLED_DRAFT, what="draft")
    flags.add_connection(parser, what="host of the target")
    flags.add_speculation(parser, default=4)
    flags.add_prompts(parser)
    flags.add_sampling(parser)
    flags.add_serve(parser)


async def _draft(args: argparse.Namespace) -> int:
    config = model_config(args, args.model, num_threads=1)
    if args.serve is None:
        from inference.cli.generate import run_draft

        return await run_draft(args, config)
    from inference.cli.serve import serve_draft

    server = ServerConfig(args.host, args.serve, args.max_waiting, grace_s=args.grace_s)
    return await serve_draft(args, config, server)


def _client_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_connection(parser, what="host of the server")
    flags.add_concurrency(parser)
    flags.add_speculation(parser, default=None)
    flags.add_prompts(parser)
    flags.add_sampling(parser)


async def _client(args: argparse.Namespace) -> int:
    from inference.cli.generate import run_client

    return await run_client(args)


def _alone_flags(default: Path, what: str) -> Callable[[argparse.ArgumentParser], None]:
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, default=default, what=what)
        flags.add_prompts(parser)
        flags.add_sampling(parser)

    return add_flags


async def _alone(args: argparse.Namespace) -> int:
    from inference.cli.generate import run_alone

    return await run_alone(args, model_config(args, args.model, num_threads=usable_cores()))


ROLES = {
    role.name: role
    for role in (
        Role(
            "target",
            "Serve the target model to draft workers, and to clients that want no draft.",
            _target_flags,
            _target,
        ),
        Role(
            "draft",
            "Draft here, verify at a target: complete prompts, or serve clients (--serve).",
            _draft_flags,
            _draft,
        ),
        Role(
            "fused_client",
            "Complete prompts at any server: target, draft --serve, fused_target.",
            _client_flags,
            _client,
        ),
        Role(
            "verify_target",
            "Run the target model alone, here, token by token.",
            _alone_flags(BUNDLED_TARGET, "target"),
            _alone,
        ),
        Role(
            "verify_draft",
            "Run the draft model alone, here, token by token.",
            _alone_flags(BUNDLED_DRAFT, "draft"),
            _alone,
        ),
    )
}
