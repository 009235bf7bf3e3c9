"""All roles by name, and the parser of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.cli.config_file import ConfigFileParser
from inference.cli.flags import add_group, read
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
from inference.cli.roles.role import Role

_ALL: tuple[Role[Any], ...] = (
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
ROLES: dict[str, Role[Any]] = {role.name: role for role in _ALL}


def settings_of(name: str, arguments: Sequence[str]) -> Any:
    """Return the settings that a role's arguments say, an instance of its `Role.settings`.

    Raises:
        ConfigError, InvalidRequestError: a value is out of range.
        SystemExit: --help, or a flag that does not exist.
    """
    return read(ROLES[name].settings, parser_of(name).parse_args(arguments))


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
    add_group(parser, role.settings)
    return parser
