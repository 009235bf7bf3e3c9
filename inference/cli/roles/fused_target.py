"""--role fused_target: both models in one process."""

from __future__ import annotations

import argparse
from dataclasses import replace

from inference.cli import flags, settings
from inference.cli.roles.compile import compile_ahead
from inference.cli.roles.role import Role
from inference.config import DEFAULT_GAMMA, FUSED_GAMMA, FusedConfig, usable_cores


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_model_pair(parser)
    flags.add_speculation(parser, default=None, text=flags.GAMMA_THAT_PAYS)
    flags.add_adaptive_gamma(parser)
    flags.add_lookup(parser)
    flags.add_listen(parser)
    flags.add_watchdog(parser)
    flags.add_http(parser, default_port=None)
    flags.add_defaults(parser)
    flags.add_metrics(parser)
    flags.add_spans(parser)
    flags.add_trace(parser)


async def run(args: argparse.Namespace) -> int:
    config, defaults = _fused_config(args), settings.request_defaults(args, args.target_model)
    if args.compile == "only":
        return await compile_ahead(config.target, config.draft.model)
    server = replace(settings.server_config(args, args.port), defaults=defaults)
    observe = settings.observe_server(args)

    from inference.serving.target import serve_fused

    await serve_fused(config, server, settings.optional_http(args), observe)
    return 0


def _fused_config(args: argparse.Namespace) -> FusedConfig:
    """Both models may use all cores: one process runs one of them at a time."""
    method = settings.method_of_pair(args, has_draft=args.draft_model != flags.NGRAM)
    gamma = args.gamma
    if gamma is None:
        gamma = DEFAULT_GAMMA if args.backend == "neuron" else FUSED_GAMMA
    neuron = settings.neuron_options(args, gamma=gamma, method=method)
    target = settings.model_config(args, args.target_model, num_threads=usable_cores(), neuron=neuron)
    draft = settings.proposer_config(
        args,
        str(args.target_model) if method == "medusa" else args.draft_model,  # Medusa's draft is in the target
        tokenizer=args.target_model,
        num_threads=usable_cores(),
        neuron=settings.neuron_options(args, method=method, tp_degree=args.draft_tp_degree),
    )
    return FusedConfig(target, draft, gamma, args.adaptive_gamma)


ROLE = Role("fused_target", "Serve both models from one process.", add_flags, run)
