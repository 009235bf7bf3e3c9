"""All roles by name, and the parser of each."""

from __future__ import annotations

from inference.cli import flags
from inference.cli.config_file import ConfigFileParser
from inference.cli.roles import (
    alone,
    artifacts,
    compile,
    draft,
    fused_client,
    fused_target,
    gateway,
    rescale_fp8,
    target,
    token,
)

_ALL = (
    target.ROLE,
    draft.ROLE,
    fused_target.ROLE,
    fused_client.ROLE,
    gateway.ROLE,
    compile.ROLE,
    artifacts.ROLE,
    rescale_fp8.ROLE,
    token.ROLE,
    alone.TARGET,
    alone.DRAFT,
)
ROLES = {role.name: role for role in _ALL}


def parser_of(name: str) -> ConfigFileParser:
    """A parser of one role's flags alone."""
    role = ROLES[name]
    parser = ConfigFileParser(
        role=name,
        roles={each: lambda each=each: parser_of(each) for each in ROLES},  # type: ignore[misc]
        prog=f"main.py --role {name}",
        description=role.summary,
        allow_abbrev=False,
    )
    role.add_flags(parser)
    flags.add_reports(parser)
    return parser
