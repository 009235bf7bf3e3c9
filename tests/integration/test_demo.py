"""Tests of `specdec demo`, run as a process, with the models in this repository."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from specdec.inference.cli.demo.speed import next_steps, sampling_of
from specdec.inference.cli.prompts.source import read_prompts
from specdec.inference.cli.roles.registry import ROLES, parser_of
from specdec.inference.config import BUNDLED_PROMPTS, ROOT
from tests.support.servers import run_command


def most_often(text: str, length: int) -> int:
    """Return how often the most frequent sequence of `length` words occurs in a text; 0 if it has fewer words."""
    words = text.split()
    runs = Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))
    return max(runs.values(), default=0)


async def output_of(*arguments: str, program: str = "-m specdec") -> str:
    """Run `specdec ARGUMENTS` as a process, which must end with exit code 0; return its standard output."""
    variables = {"COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    result = await run_command(*arguments, program=program, timeout_s=170, variables=variables)
    assert result.code == 0, result.stdout
    return result.stdout


@pytest.mark.release
async def test_the_demo_of_a_loss_ends_with_the_same_tokens() -> None:
    output = await output_of("demo", "failover")
    before, _, after = output.partition("--- kill -9: the server at 127.0.0.1:")
    assert before.count(" ") > 20
    assert re.search(r"went on after \d+\.\d s: 400 tokens, same tokens as without the loss\.$", after.strip())


ONE_PAIR = """
import sys
from specdec.inference.workers.completing import results
results.NUM_PAIRS = 1
from specdec import main
sys.exit(main())
"""
"""Program that runs the demo with one measurement per prompt, with and without a draft, instead of four."""


@pytest.mark.long
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.release)])
async def test_the_demo_shows_each_prompts_continuation(is_short: bool, tmp_path: Path) -> None:
    """The demo shows each prompt's continuation and, in its table, whether it was greedy; prose is always sampled.

    Regression: greedily, the small model's prose was "I am afraid I am afraid I am afraid".
    """
    (tmp_path / "short.py").write_text(ONE_PAIR)
    output = await output_of("demo", program=str(tmp_path / "short.py") if is_short else "-m specdec")
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
    assert "specdec demo failover" in output


def test_the_next_steps_are_commands_that_exist() -> None:
    ours = [shlex.split(line.partition(" -m specdec ")[2]) for line in next_steps().splitlines() if "specdec" in line]
    assert len(ours) == 4
    for command, *arguments in ours:
        if command != "compare":
            assert command in ROLES
            parser_of(command).parse_args(arguments)
    assert "/v1/completions" in next_steps()
