"""The roles of main.py: which flags each takes, and what it runs. Only a role that needs a model imports one."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.cli import flags
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ModelConfig, ProposerConfig, ServerConfig, usable_cores
from inference.errors import ConfigError

logger = logging.getLogger(__name__)

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
        flags.add_reports(parser)
        return parser


def _model_config(args: argparse.Namespace, path: Path, *, num_threads: int) -> ModelConfig:
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


def _proposer_config(args: argparse.Namespace, draft: str, *, tokenizer: Path, num_threads: int) -> ProposerConfig:
    """What the flags say of the draft: a model directory, or ngram with the tokenizer of another model."""
    if draft == flags.NGRAM:
        return ProposerConfig(tokenizer, None, args.batch)
    model = _model_config(args, Path(draft), num_threads=num_threads)
    return ProposerConfig(model.path, model, args.batch)


def _server_config(args: argparse.Namespace, port: int) -> ServerConfig:
    return ServerConfig(args.host, port, args.max_waiting, grace_s=args.grace_s)


def _target_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, default=BUNDLED_TARGET, what="target")
    flags.add_listen(parser)
    flags.add_sessions(parser)
    flags.add_trace(parser)


async def _target(args: argparse.Namespace) -> int:
    from inference.cli.serve import serve_target

    server = replace(_server_config(args, args.port), idle_timeout_s=args.idle_timeout_s)
    # On loopback the draft runs beside it; two busy processes on one core slow each other down many times over.
    num_threads = max(1, usable_cores() - 1) if server.on_loopback else usable_cores()
    return await serve_target(args, _model_config(args, args.model, num_threads=num_threads), server)


def _fused_target_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_model_pair(parser)
    flags.add_speculation(parser, default=4)
    flags.add_listen(parser)
    flags.add_trace(parser)


async def _fused_target(args: argparse.Namespace) -> int:
    from inference.cli.serve import serve_fused

    if args.tp_degree < 1:
        raise ConfigError(f"tp_degree {args.tp_degree} is below 1")
    if args.tp_degree > 1:
        logger.warning("tp_degree %d has no effect: backend %s does not shard a model", args.tp_degree, args.backend)
    # One process, one model at a time: both may use all cores.
    target = _model_config(args, args.target_model, num_threads=usable_cores())
    draft = _proposer_config(args, args.draft_model, tokenizer=args.target_model, num_threads=usable_cores())
    return await serve_fused(args, target, draft, _server_config(args, args.port))


def _draft_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_draft_model(parser)
    flags.add_connection(parser, what="host of the target")
    flags.add_speculation(parser, default=4)
    flags.add_schedule(parser)
    flags.add_prompts(parser)
    flags.add_sampling(parser)
    flags.add_serve(parser)
    flags.add_attach(parser)
    flags.add_trace(parser)


async def _draft(args: argparse.Namespace) -> int:
    config = _proposer_config(args, args.model, tokenizer=args.tokenizer, num_threads=1)
    if args.attach is not None:
        from inference.cli.serve import assist_targets

        return await assist_targets(args, config)
    if args.serve is None:
        from inference.cli.generate import run_draft

        return await run_draft(args, config)
    from inference.cli.serve import serve_draft

    return await serve_draft(args, config, _server_config(args, args.serve))


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
        flags.add_trace(parser)

    return add_flags


async def _alone(args: argparse.Namespace) -> int:
    from inference.cli.generate import run_alone

    return await run_alone(args, _model_config(args, args.model, num_threads=usable_cores()))


_ALL = (
    Role("target", "Serve the target to draft workers, and to clients without any draft.", _target_flags, _target),
    Role("draft", "Draft here, verify at a target: complete prompts, or --serve clients.", _draft_flags, _draft),
    Role("fused_target", "Serve both models from one process.", _fused_target_flags, _fused_target),
    Role("fused_client", "Complete prompts at any of our servers.", _client_flags, _client),
    Role("verify_target", "Run the target alone, here.", _alone_flags(BUNDLED_TARGET, "target"), _alone),
    Role("verify_draft", "Run the draft alone, here.", _alone_flags(BUNDLED_DRAFT, "draft"), _alone),
)
ROLES = {role.name: role for role in _ALL}
