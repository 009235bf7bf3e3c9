"""--role target: the target model, for draft workers and for clients without any draft."""

from __future__ import annotations

import argparse
from dataclasses import replace

from inference.cli import flags, settings
from inference.cli.roles.compile import compile_ahead
from inference.cli.roles.role import Role
from inference.config import BUNDLED_TARGET, usable_cores


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, default=BUNDLED_TARGET, what="target")
    flags.add_verification(parser)
    flags.add_lookup(parser)
    flags.add_listen(parser)
    flags.add_sessions(parser)
    flags.add_http(parser, default_port=None)
    flags.add_defaults(parser)
    flags.add_watchdog(parser)
    flags.add_metrics(parser)
    flags.add_spans(parser)
    flags.add_trace(parser)


async def run(args: argparse.Namespace) -> int:
    defaults = settings.request_defaults(args, args.model)
    server = replace(settings.server_config(args, args.port), defaults=defaults)
    # On loopback the draft runs beside it; two busy processes on one core slow each other down many times over.
    num_threads = max(1, usable_cores() - 1) if server.on_loopback else usable_cores()
    neuron = settings.neuron_options(args, gamma=args.gamma)
    model = settings.model_config(args, args.model, num_threads=num_threads, neuron=neuron)
    if args.compile == "only":
        return await compile_ahead(model, None)
    observe = settings.observe_server(args)

    from inference.serving.target import serve_target

    await serve_target(model, server, settings.optional_http(args), observe)
    return 0


ROLE = Role("target", "Serve the target to draft workers, and to clients without any draft.", add_flags, run)
