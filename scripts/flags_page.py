"""Writes docs/flags.md, all flags of every command, from the settings: `python -m scripts.flags_page`."""

from __future__ import annotations

import argparse
import re

from comparison.plan.flags import comparison_parser
from comparison.study.flags import StudySettings, study_parser
from inference.cli.roles.registry import ROLES, parser_of
from inference.config import ROOT

PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags

Made by `python -m scripts.flags_page` from the settings; `--help` of a command shows the same. Each command takes
`--config FILE` too, once or several times: JSON or TOML with flags, over which those of the command line win.
"""
STUDY = "Takes the comparison's flags, with defaults of its own that its `--help` shows, and these:"
NO_DEFAULT = ("None", "False", "[]", "{}", "")


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, *(_command(f"specdec {name}", parser_of(name), role.summary) for name, role in ROLES.items())]
    parts.append(_command("specdec compare", comparison_parser(), "LIST is comma-separated."))
    parts.append(_command("specdec study", study_parser(), STUDY, StudySettings.SECTION))
    return "\n".join(parts).replace(f"{ROOT}/", "")


def _command(name: str, parser: argparse.ArgumentParser, text: str, only: str = "") -> str:
    """Return the section of a command, or `only` one group of its flags."""
    rows = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    for group in parser._action_groups:
        if group._group_actions and group.title != "options" and (only or group.title) == group.title:
            rows += [f"| **{group.title}** | | | |", *map(_row, group._group_actions)]
    return "\n".join([f"## {name}", "", text, "", *rows, ""])


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings or [action.dest])
    value = action.metavar or ", ".join(map(str, action.choices or ()))
    default = "required" if action.required else "" if str(action.default) in NO_DEFAULT else action.default
    text = re.sub(r"( \((default: )?%\(default\)s( s)?\))*$", "", action.help or "") % vars(action)
    cells = (str(each).replace("|", "\\|").replace("<", "&lt;") for each in (names, value, default, text))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
