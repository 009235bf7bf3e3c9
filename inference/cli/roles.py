"""The roles of main.py: which flags each takes, and what it runs. Only a role that needs a model imports one."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.cli import flags
from inference.cli.config_file import ConfigFileParser
from inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    DEFAULT_GAMMA,
    FUSED_GAMMA,
    ModelConfig,
    NeuronOptions,
    ProposerConfig,
    ServerConfig,
    usable_cores,
)
from inference.errors import ConfigError
from inference.request import Schedule

logger = logging.getLogger(__name__)

Run = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]


@dataclass(frozen=True, slots=True)
class Role:
    """One value of --role."""

    name: str
    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Run

    def parser(self) -> ConfigFileParser:
        """A parser of this role's flags alone."""
        parser = ConfigFileParser(
            role=self.name,
            roles={name: role.parser for name, role in ROLES.items()},
            prog=f"main.py --role {self.name}",
            description=self.summary,
            allow_abbrev=False,
        )
        self.add_flags(parser)
        flags.add_reports(parser)
        return parser


def _model_config(args: argparse.Namespace, path: Path, *, num_threads: int, gamma: int = 0) -> ModelConfig:
    """What the flags say of a model; `num_threads` is used unless they name a number.

    Args:
        gamma: draft tokens that a compiled verification pass has room for; none for a draft, or a model alone.
    """
    return ModelConfig(
        path=path,
        backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        sequence_length=args.sequence_length,
        num_slots=args.batch,
        num_threads=args.threads or num_threads,
        neuron=_neuron_options(args, gamma=gamma),
    )


def _neuron_options(args: argparse.Namespace, *, gamma: int) -> NeuronOptions:
    method = args.speculation_method or "vanilla"
    if "neuron" not in args.backend:
        if args.tp_degree > 1:
            logger.warning(
                "tp_degree %d has no effect: backend %s does not shard a model", args.tp_degree, args.backend
            )
        if method != "vanilla" or args.neuron_config:
            raise ConfigError(f"backend {args.backend} takes neither --speculation_method nor --neuron_config")
    return NeuronOptions(args.tp_degree, gamma, method, args.neuron_config, args.compiled_model_path, args.neuron_cores)


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
    flags.add_verification(parser)
    flags.add_listen(parser)
    flags.add_sessions(parser)
    flags.add_metrics(parser)
    flags.add_telemetry(parser)
    flags.add_trace(parser)


async def _target(args: argparse.Namespace) -> int:
    from inference.cli.serve import serve_target

    server = replace(_server_config(args, args.port), idle_timeout_s=args.idle_timeout_s)
    # On loopback the draft runs beside it; two busy processes on one core slow each other down many times over.
    num_threads = max(1, usable_cores() - 1) if server.on_loopback else usable_cores()
    config = _model_config(args, args.model, num_threads=num_threads, gamma=args.gamma)
    return await serve_target(args, config, server)


def _fused_target_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_model_pair(parser)
    flags.add_speculation(parser, default=None, text=flags.GAMMA_THAT_PAYS)
    flags.add_adaptive_gamma(parser)
    flags.add_listen(parser)
    flags.add_http(parser, default_port=None)
    flags.add_metrics(parser)
    flags.add_telemetry(parser)
    flags.add_trace(parser)


async def _fused_target(args: argparse.Namespace) -> int:
    from inference.cli.serve import serve_fused

    _default_to_fused(args, has_draft=args.draft_model != flags.NGRAM)
    if args.gamma is None:
        args.gamma = DEFAULT_GAMMA if args.backend == "neuron" else FUSED_GAMMA
    # One process, one model at a time: both may use all cores.
    target = _model_config(args, args.target_model, num_threads=usable_cores(), gamma=args.gamma)
    # Medusa's draft is in the target's own checkpoint.
    path = str(args.target_model) if args.speculation_method == "medusa" else args.draft_model
    draft = _proposer_config(_of_draft(args), path, tokenizer=args.target_model, num_threads=usable_cores())
    return await serve_fused(args, target, draft, _server_config(args, args.port))


def _of_draft(args: argparse.Namespace) -> argparse.Namespace:
    """The flags of a draft beside its target, which may take fewer NeuronCores."""
    return argparse.Namespace(**{**vars(args), "tp_degree": args.draft_tp_degree or args.tp_degree})


def _default_to_fused(args: argparse.Namespace, *, has_draft: bool) -> None:
    """Where both models are in one process, NxDI's fused graph is the method unless the flags name another."""
    if args.speculation_method is None and args.backend == "neuron" and has_draft:
        args.speculation_method = "fused"


def _compile_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_compiled_models(parser)
    flags.add_verification(parser)


async def _compile(args: argparse.Namespace) -> int:
    from inference.cli.compile import run_compile

    target, draft = args.target_model, args.draft_model
    _default_to_fused(args, has_draft=target is not None and draft is not None)
    return await run_compile(
        args,
        None if target is None else _model_config(args, target, num_threads=usable_cores(), gamma=args.gamma),
        None if draft is None else _model_config(_of_draft(args), draft, num_threads=usable_cores()),
    )


def _draft_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_draft_model(parser)
    flags.add_connection(parser, what="host of the target")
    flags.add_speculation(parser, default=DEFAULT_GAMMA)
    flags.add_schedule(parser)
    flags.add_prompts(parser)
    flags.add_sampling(parser)
    flags.add_serve(parser)
    flags.add_metrics(parser)
    flags.add_telemetry(parser)
    flags.add_attach(parser)
    flags.add_trace(parser)


async def _draft(args: argparse.Namespace) -> int:
    config = _proposer_config(args, args.model, tokenizer=args.tokenizer, num_threads=1)
    if args.attach is not None or Schedule(args.schedule).runs_ahead:
        config = replace(config, branches=args.branches)  # rounds have no use for them
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
    flags.add_speculation(parser, default=None, text=flags.GAMMA_OF_A_SERVER)
    flags.add_prompts(parser)
    flags.add_sampling(parser)


async def _client(args: argparse.Namespace) -> int:
    from inference.cli.generate import run_client

    return await run_client(args)


def _gateway_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_connection(parser, what="host of the server behind it")
    flags.add_http(parser, default_port=8000)
    flags.add_http_listen(parser)
    flags.add_telemetry(parser)


async def _gateway(args: argparse.Namespace) -> int:
    from inference.cli.gateway import serve_gateway

    return await serve_gateway(args)


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
    Role("gateway", "Serve OpenAI's HTTP API in front of any of our servers.", _gateway_flags, _gateway),
    Role("compile", "Compile models ahead of time for backend neuron.", _compile_flags, _compile),
    Role("verify_target", "Run the target alone, here.", _alone_flags(BUNDLED_TARGET, "target"), _alone),
    Role("verify_draft", "Run the draft alone, here.", _alone_flags(BUNDLED_DRAFT, "draft"), _alone),
)
ROLES = {role.name: role for role in _ALL}
