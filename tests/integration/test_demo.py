"""What a newcomer sees first: `make demo`, as a process, on the bundled models."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections import Counter

import pytest

from inference.cli.prompts.source import read_prompts
from inference.cli.roles.registry import parser_of
from inference.config import BUNDLED_PROMPTS, ROOT
from scripts.demo import NEXT_STEPS, sampling_of


def most_often(text: str, length: int) -> int:
    """How often the commonest run of so many words occurs."""
    words = text.split()
    runs = Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))
    return max(runs.values(), default=0)


@pytest.mark.long
async def test_the_demo_shows_each_prompts_continuation() -> None:
    """The story: greedily, the small model's prose was "I am afraid I am afraid I am afraid"."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "scripts" / "demo.py"),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    prompts = read_prompts(None, BUNDLED_PROMPTS)
    prose = [prompt for prompt in prompts if not sampling_of(prompt).greedy]
    assert set(prose) == set(prompts) & set(read_prompts(None, ROOT / "prompts" / "open_ended.txt"))
    for prompt in prose:
        text = output.partition(prompt)[2].partition("\n".join(prompts[prompts.index(prompt) + 1 :][:1]))[0]
        assert len(text.split()) > 20
        assert most_often(text, 4) <= 2, text
    rows = [line for line in output.splitlines() if line.rstrip().endswith(" yes")]
    choices = [re.search(r" (greedy|T 0\.8) ", row) for row in rows[: len(prompts)]]
    assert [match and match[1] for match in choices] == ["T 0.8" if each in prose else "greedy" for each in prompts]
    assert len(rows) == len(prompts) + 1, "every prompt, and all"
    assert "speed-up  B/tok  exact" in output, "the table fits a terminal of 80 columns"
    assert NEXT_STEPS.strip() in output


def test_the_next_steps_are_commands_that_exist() -> None:
    commands = NEXT_STEPS.replace("\\\n", " ").splitlines()
    ours = [shlex.split(line.partition(".venv/bin/python")[2]) for line in commands if ".venv/bin/python" in line]
    assert [command[0] for command in ours] == ["main.py", "compare_architectures.py", "main.py"]
    for program, *arguments in ours:
        assert (ROOT / program).is_file()
        if program == "main.py":
            assert arguments[0] == "--role"
            parser_of(arguments[1]).parse_args(arguments[2:])
    assert "/v1/completions" in NEXT_STEPS


def test_installation_is_not_silent() -> None:
    text = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^INSTALL = .*?[^\\]$", text, re.MULTILINE | re.DOTALL)
    assert "--progress-bar on" in command
    assert "--quiet" not in command
