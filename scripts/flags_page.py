"""Generator of docs/flags.md, with all flags of every command: `python -m scripts.flags_page`."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from specdec.comparison.plan.flags import comparison_parser
from specdec.comparison.study.flags import StudySettings, study_parser
from specdec.inference.cli.roles.registry import ROLES, parser_of
from specdec.inference.config import ROOT

PAGE = ROOT / "docs" / "flags.md"
SETS = {
    "models": ("doctor", "target", "draft", "fused_target", "compile", "verify_target", "verify_fused", "verify_draft"),
    "servers": ("target", "draft", "fused_target", "gateway"),
    "prompts": ("draft", "fused_client", "verify_target", "verify_fused", "verify_draft"),
    "fused": ("fused_target", "verify_fused"),
    "verify": ("verify_target", "verify_fused", "verify_draft"),
}
"""Sets of commands by a name that replaces them in cells of the page's table; earlier sets are tried first."""
HEAD = """# Flags

All flags of all commands, made by `python -m scripts.flags_page`; `specdec COMMAND --help` lists those of one command.
Each command takes `--config FILE` too, once or several times: JSON or TOML with flags, over which those of the command
line win. `study` takes the flags of `compare`, with defaults of its own that its `--help` shows. LIST has commas.

Where commands differ, a cell has a line for each variant, which may begin with `...` in place of the line above; a line
without a command's name is for all other commands of the row. Sets of commands:

"""
NO_DEFAULT = ("None", "False", "[]", "{}", "")


class Flag(NamedTuple):
    """One flag of one command, as texts for the page's table."""

    command: str
    names: str
    default: str
    meaning: str


def page() -> str:
    """Return the text of docs/flags.md, made from the commands' parsers."""
    groups: dict[str, list[str]] = defaultdict(list)
    flags: dict[str, list[Flag]] = defaultdict(list)
    for name, group, action in _actions():
        key = action.option_strings[0] if action.option_strings else action.dest
        if key not in flags:
            groups[group].append(key)
        flags[key].append(_flag(name, action))
    sets = (f"- **{name}**: {', '.join(commands)}" for name, commands in SETS.items())
    rows = ["| flag and value | commands | default | meaning |", "|---|---|---|---|"]
    for group, keys in groups.items():
        rows += [f"| **{group}** |", *(_row(flags[key]) for key in keys)]
    return (HEAD + "\n".join([*sets, "", *rows, ""])).replace(f"{ROOT}/", "")


def _actions() -> Iterator[tuple[str, str, argparse.Action]]:
    """Yield (command, title of the flag's group, flag) for each flag of each command."""
    parsers = {**{name: parser_of(name) for name in ROLES}, "compare": comparison_parser(), "study": study_parser()}
    for name, parser in parsers.items():
        only = StudySettings.SECTION if name == "study" else None
        for group in parser._action_groups:
            if group.title and group.title != "options" and (only or group.title) == group.title:
                yield from ((name, group.title, action) for action in group._group_actions)


def _flag(command: str, action: argparse.Action) -> Flag:
    names = ", ".join(f"`{name}`" for name in action.option_strings or [action.dest])
    names = " ".join([names, str(action.metavar or ", ".join(map(str, action.choices or ())))]).rstrip()
    default = "required" if action.required else "" if str(action.default) in NO_DEFAULT else action.default
    text = re.sub(r"( \((default: )?%\(default\)s( s)?\))*$", "", action.help or "") % vars(action)
    return Flag(command, *(str(each).replace("|", "\\|").replace("<", "&lt;") for each in (names, default, text)))


def _row(flags: list[Flag]) -> str:
    commands = _named([flag.command for flag in flags])
    cells = (_merged(flags, column) for column in ("names", "default", "meaning"))
    return "| {0} | {commands} | {1} | {2} |".format(*cells, commands=commands)


def _merged(flags: list[Flag], column: str) -> str:
    """Return the text of a table cell for one flag of several commands; `column` names a field of `Flag`.

    It is the most frequent value, then each other value after the names of the commands that have it.
    """
    variants: dict[str, list[str]] = defaultdict(list)
    for flag in flags:
        variants[getattr(flag, column)].append(flag.command)
    first, *others = sorted(variants.items(), key=lambda variant: -len(variant[1]))
    empty = "none" if others and column == "default" else ""
    shorter = {text: text.replace(f"{first[0]} ", "... ", 1) if column == "meaning" else text for text, _ in others}
    return "<br>".join([first[0] or empty, *(f"{_named(names)}: {shorter[text] or empty}" for text, names in others)])


def _named(commands: list[str]) -> str:
    """Return the commands' names as text; where all commands of a set in SETS are there, its name replaces them."""
    names, left = [], set(commands)
    for name, members in SETS.items():
        if left.issuperset(members):
            names.append(f"**{name}**")
            left.difference_update(members)
    return ", ".join([*names, *(command for command in commands if command in left)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
