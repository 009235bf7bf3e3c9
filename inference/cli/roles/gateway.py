"""--role gateway: OpenAI's HTTP API in front of any of our servers."""

from __future__ import annotations

import argparse
from dataclasses import replace

from inference.cli import flags, settings
from inference.cli.roles.role import Role
from inference.config import ObserveConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_connection(parser, what="host of the server behind it")
    flags.add_http(parser, default_port=8000)
    flags.add_http_listen(parser)
    flags.add_spans(parser)


async def run(args: argparse.Namespace) -> int:
    connection, http = settings.connection_config(args), replace(settings.http_config(args), deadline_s=args.deadline_s)
    server = settings.server_config(args, args.http_port)
    observe = ObserveConfig(args.role, args.profile, otlp_endpoint=args.otlp_endpoint)

    from inference.serving.gateway import serve_gateway

    await serve_gateway(connection, http, server, observe)
    return 0


ROLE = Role("gateway", "Serve OpenAI's HTTP API in front of any of our servers.", add_flags, run)
