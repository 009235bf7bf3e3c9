"""Flags, help, ranges and configuration files are all made from the fields of configuration classes."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from scripts.flags_page import PAGE, page
from specdec.comparison.plan.flags import comparison_parser
from specdec.comparison.study.flags import study_parser
from specdec.inference.cli.config_file import as_toml
from specdec.inference.cli.flags import add_group
from specdec.inference.cli.prompts.source import PromptSettings
from specdec.inference.cli.roles.registry import ROLES, parser_of, settings_of
from specdec.inference.config import ROOT, DialSecurity, PortSecurity, ServerConfig
from specdec.inference.declared import read
from specdec.inference.errors import ConfigError
from specdec.inference.settings import GROUP, Range, check, group, setting

NEEDED = {
    "artifacts": ["ls"],
    "doctor": ["a"],
    "rescale_fp8": ["--model", "a", "--output", "b"],
    "token": ["--auth_file", "a", "--name", "n", "--grant", "client", "--grant", "ops"],
    "worker": ["--attach", "a:1,b:2"],
}
"""Required arguments by role; the other roles have a default for every setting."""
CHANGED = {
    "target": ["--no-lookup", "--batch", "3", "--neuron_config", '{"a": {"b": "\\u00e9"}}', "--http_port", "1"],
    "draft": ["--serve", "7", "--schedule", "sync", "--stop", "a\n", "--stop", 'b"', "--emulate", "draft:3ms"],
    "fused_target": ["--no-adaptive_gamma", "--gamma", "2", "--device_sampling", "--temperature", "0.5"],
    "fused_client": ["--choice", "a,b", "--choice", "c", "--seed", "9", "--tls_ca", "ca.pem", "--profile"],
    "gateway": ["--serve", "--no_page", "--stream_chunk", "pass", "--max_body_mib", "0.5", "--drain_delay_s", "1"],
    "worker": ["--serve", "7", "--branches", "1", "--model", "ngram"],
}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_reads_its_defaults(role: str) -> None:
    """Each role (kind of process) has all its settings if only its required arguments are given.

    Regression: a role that lacked a group of flags crashed at its start.
    """
    settings = settings_of(role, NEEDED.get(role, []))
    assert isinstance(settings, ROLES[role].settings)
    assert settings.observe.role == role
    assert settings.observe.log_level == {"demo": "error", "chat": "warning"}.get(role, "info")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("changes", [False, True])
def test_settings_survive_a_configuration_file(role: str, changes: bool, tmp_path: Path) -> None:
    """Settings written into a configuration file are the same when they are read back.

    With `changes`, the settings of `CHANGED` are set too, beside the required ones.

    Regression: `lookup = false` was ignored, and neuron_config was written in Python's syntax.
    """
    arguments = [*NEEDED.get(role, []), *(CHANGED.get(role, []) if changes else [])]
    args = (parser := parser_of(role)).parse_args(arguments)
    positional = [vars(args).pop(action.dest) for action in parser._actions if not action.option_strings]
    words = [str(each) for each in positional if each is not None]
    (tmp_path / "flags.toml").write_text(as_toml(args), encoding="utf-8")
    again = settings_of(role, ["--config", str(tmp_path / "flags.toml"), *words])
    assert again == settings_of(role, arguments)


@pytest.mark.parametrize("role", ROLES)
def test_every_flag_has_a_help_and_a_section(role: str) -> None:
    parser = parser_of(role)
    titled = {action for each in parser._action_groups if each.title for action in each._group_actions}
    assert {action.dest for action in parser._actions if action not in titled or not action.help} == set()


@pytest.mark.parametrize("role", ROLES)
def test_omitted_settings_of_a_role_are_flags(role: str) -> None:
    """Each setting that a role says it leaves out exists; a misspelt name would silently leave out nothing."""
    for each in fields(ROLES[role].settings):
        if GROUP in each.metadata:
            add_group(parser := ArgumentParser(), each.metadata[GROUP].kind)
            assert each.metadata[GROUP].without <= {action.dest for action in parser._actions}


@dataclass(frozen=True)
class _Lamp:
    """Configuration of these tests, with two settings.

    Attributes:
        watts: power (%(default)s W)
        color: light
    """

    watts: float = setting(5.0, "--watts W", within=Range(0.0, 60.0))
    color: str = setting("white", "--colour --light_color", choices=("white", "red"))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class _Room:
    """Configuration of these tests with three groups of settings, the second of which is optional."""

    lamp: _Lamp = group(_Lamp, "lamp", watts=7.0)
    dial: DialSecurity | None = group(DialSecurity, needs=("tls_ca",), without=("token_file",))
    ports: PortSecurity = group(PortSecurity)


def room(*arguments: str) -> tuple[Any, str]:
    """Return the `_Room` that these command-line arguments set, and the text of the command's --help."""
    parser = ArgumentParser()
    add_group(parser, _Room)
    return read(_Room, vars(parser.parse_args(arguments))), parser.format_help()


def test_a_field_has_flag_aliases_default_and_group() -> None:
    built, text = room("--light_color", "red")
    assert built == _Room(_Lamp(7.0, "red"), None)
    assert re.search(r"lamp:\n  --watts W +power \(7.0 W\)\n  --colour", text)
    assert "--token_file" not in text


def test_a_flag_of_two_groups_is_one_flag() -> None:
    built, text = room("--insecure", "--tls_ca", "ca.pem")
    assert (built.dial, built.ports.insecure) == (DialSecurity(Path("ca.pem"), insecure=True), True)
    assert text.count("  --insecure") == 1


@pytest.mark.parametrize(("arguments", "fault"), [
    (("--watts", "61"), "watts 61.0 is outside 0..60"), (("--watts", "nan"), "watts nan is outside 0..60"),
])  # fmt: skip
def test_the_range_of_a_field_is_checked(arguments: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        room(*arguments)
    with pytest.raises(ConfigError, match="colour blue is none of white, red"):
        _Lamp(color="blue")


def test_a_serving_drafts_prompts_need_no_safe_host() -> None:
    """A draft that serves clients refuses a plain-text --host beyond loopback; one that only completes does not."""
    assert settings_of("draft", ["--host", "0.0.0.0"]).server is None
    with pytest.raises(ConfigError, match="not loopback"):
        settings_of("draft", ["--host", "0.0.0.0", "--serve"])


@pytest.mark.parametrize("kind", [ServerConfig, PromptSettings])
def test_defaults_of_a_configuration_are_those_of_its_flags(kind: Any) -> None:
    add_group(parser := ArgumentParser(), kind)
    assert read(kind, vars(parser.parse_args([]))) == kind()


def table_of(heading: str) -> dict[str, str]:
    """Return the table below a heading of docs/commands.md: from first column to second, without links in brackets."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").partition(heading)[2]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text.partition("\n\n|")[2].partition("\n\n")[0], re.M)
    return {first: re.sub(r" \(.*\]\(.*\)\)", "", second) for first, second in rows}


def test_the_page_of_commands_lists_every_role() -> None:
    """The page of commands lists every role.

    Regression: the role `artifacts` was missing in the table.
    """
    known = {f"`{name}`": role.summary.removesuffix(".") for name, role in ROLES.items()}
    assert table_of("## Roles") == known


GUIDES = [ROOT / name for name in ("README.md", "docs/first_steps.md", "docs/commands.md", "docs/speculation.md")]
COMMAND = re.compile(r"^(?:specdec|python main\.py --role) (?!diff)(.*)$", re.M)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_guides_name_flags_that_exist(guide: Path) -> None:
    """Every flag named in a guide exists, with dashes or underscores; a guide may also name the beginning of one."""
    parsers = [*map(parser_of, ROLES), comparison_parser(), study_parser()]
    known = {
        "--role",
        "--index-url",
        "--engines",  # of benchmarks.flips
        "--only",  # of make claims
        *(each for parser in parsers for it in parser._actions for each in it.option_strings),
    }
    spelled = {name.replace("-", "_") for name in known}
    named = re.findall(r"(?<![\w|-])--[a-z][\w-]*", guide.read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [name for name in named if not any(each.startswith(name.replace("-", "_")) for each in spelled)] == []


@pytest.mark.parametrize("line", [
    pytest.param(line, id=line)
    for guide in GUIDES
    for line in COMMAND.findall(guide.read_text(encoding="utf-8"))
])  # fmt: skip
def test_commands_of_guides_are_accepted(line: str) -> None:
    """Commands in guides are accepted, and those that attach a worker to a target pass an access token.

    Regression: README's command of a worker had no token, so a target on a network refused it.
    """
    command, *arguments = shlex.split(line, comments=True)
    if command in ("compare", "study"):
        parser = comparison_parser() if command == "compare" else study_parser()
        assert parser.parse_args([re.sub(r"(?<=\w)-(?=\w)", "_", each) for each in arguments])
        return
    settings_of(command, arguments)
    assert "--attach" not in arguments or "--token_file" in arguments


def test_the_page_of_flags_follows_from_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m scripts.flags_page`"
