"""--role draft: the draft model. Completes prompts at the edge, serves clients there, or joins the pool of targets."""

from __future__ import annotations

import argparse
from dataclasses import replace

from inference.cli import flags, settings
from inference.cli.roles.compile import compile_ahead
from inference.cli.roles.role import Role
from inference.config import DEFAULT_GAMMA, ProposerConfig, check_gamma, targets
from inference.errors import ConfigError
from inference.request import Schedule


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_draft_model(parser)
    flags.add_connection(parser, what="host of the target")
    flags.add_speculation(parser, default=DEFAULT_GAMMA)
    flags.add_schedule(parser)
    flags.add_prompts(parser)
    flags.add_sampling(parser)
    flags.add_serve(parser)
    flags.add_http(parser, default_port=None)
    flags.add_metrics(parser)
    flags.add_spans(parser)
    flags.add_attach(parser)
    flags.add_trace(parser)


async def run(args: argparse.Namespace) -> int:
    proposer = _proposer_config(args)
    if args.compile == "only":
        return await compile_ahead(None, proposer.model)
    if args.attach is not None:
        return await _attach(args, proposer)
    if args.serve is not None:
        return await _serve(args, proposer)
    job = settings.prompt_job(args, gamma=args.gamma, trace=args.trace)
    draft = settings.draft_config(args, max_waiting=len(job.prompts))

    from inference.cli.prompts.topologies import run_draft

    return await run_draft(job, proposer, draft)


def _proposer_config(args: argparse.Namespace) -> ProposerConfig:
    from inference.backends.registry import CANNOT_FORK

    neuron = settings.neuron_options(args)
    config = settings.proposer_config(args, args.model, tokenizer=args.tokenizer, num_threads=1, neuron=neuron)
    runs_ahead = args.attach is not None or Schedule(args.schedule).runs_ahead
    if not runs_ahead or args.backend in CANNOT_FORK:  # rounds have no use for them
        return config
    return replace(config, branches=args.branches)


async def _serve(args: argparse.Namespace, proposer: ProposerConfig) -> int:
    server = settings.server_config(args, args.serve)
    draft, observe = settings.draft_config(args, max_waiting=server.max_waiting), settings.observe_server(args)

    from inference.serving.draft import serve_draft

    await serve_draft(proposer, draft, server, settings.optional_http(args), observe)
    return 0


async def _attach(args: argparse.Namespace, proposer: ProposerConfig) -> int:
    if not (attached := targets(args.attach)):
        raise ConfigError("--attach names no target")
    gamma = check_gamma(args.gamma)
    for flag, given in (("--profile", args.profile), ("--http_port", args.http_port is not None)):
        if given:
            raise ConfigError(f"{flag} with --attach: the requests live at the target; give it there")
    server = settings.server_config(args, args.serve or 0)
    observe, security = settings.observe_server(args), settings.dial_security(args)
    for where in attached:
        security.check(where)

    from inference.serving.draft import help_targets

    tells_health = args.serve is not None
    await help_targets(proposer, attached, server, observe, gamma=gamma, security=security, tells_health=tells_health)
    return 0


ROLE = Role("draft", "Draft here, verify at a target: complete prompts, or --serve clients.", add_flags, run)
