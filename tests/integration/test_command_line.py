"""Commands run as processes: what they write to stdout and stderr, and their exit codes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specdec.inference.cli.app import main
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess, free_port
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.prompts import PROMPTS
from tests.support.servers import CommandResult, complete, complete_all, fused_server, run_command

pytestmark = pytest.mark.slow

KEYS = {
    "prompt",
    "text",
    "token_ids",
    "finish_reason",
    "seed",
    "num_prompt_tokens",
    "num_cached_tokens",
    "acceptance_rate",
    "timings",
}
UNICODE = ["naïve Übung", "東京タワー 🙂", "Жизнь\u00a0и", "{'a': [1, 2]}", '"quoted" \\ back']


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([*PROMPTS[:16], "", "   ", *UNICODE]) + "\n", encoding="utf-8")
    return file


def assert_json(result: CommandResult, prompts: list[str]) -> None:
    """Check that standard output has one JSON object per prompt, in the order of the prompts, and nothing else."""
    assert result.code == 0, result.stderr
    assert [fields["prompt"] for fields in result.objects] == prompts
    for fields in result.objects:
        assert set(fields) >= KEYS
        assert "error" not in fields
        assert fields["finish_reason"] in ("stop", "length")
        assert set(fields["timings"]) == {"ttft_s", "tpot_s", "end_to_end_s"}
        assert 0 < fields["timings"]["ttft_s"] <= fields["timings"]["end_to_end_s"]


async def test_draft_completes_a_prompt_file(
    target: ServerProcess, models: ModelDirectories, prompt_file: Path
) -> None:
    """All prompts of a file, sent at once, get the target's text, with a draft like the target and one unlike it."""
    flags = ("--port", str(target.port), "--prompt_text", prompt_file, "--max_new_tokens", "12", "--format", "json")
    in_turns = ("--schedule", "sync")  # a worker that runs ahead of so fast a target may always come too late
    sampled = ("--temperature", "0.9", "--top_p", "0.95", "--seed", "7", "--gamma", "3")
    greedy, drawn = await asyncio.gather(
        run_command("--role", "draft", "--model", models.related, *flags, *in_turns),
        run_command("--role", "draft", "--model", models.stranger, *flags, *sampled),
    )
    prompts = [*PROMPTS[:16], *UNICODE]
    sampling = SamplingParams(temperature=0.9, top_p=0.95)
    alone = await complete_all(target, [CompletionRequest(prompt, max_new_tokens=12) for prompt in prompts])
    alone_drawn = await complete_all(
        target, [CompletionRequest(prompt, sampling, seed=7, max_new_tokens=12) for prompt in prompts]
    )
    for result, expected in ((greedy, alone), (drawn, alone_drawn)):
        assert_json(result, prompts)
        assert [fields["token_ids"] for fields in result.objects] == [completion.token_ids for completion in expected]
        assert [fields["text"] for fields in result.objects] == [completion.text for completion in expected]
    assert all(fields["seed"] == 7 for fields in drawn.objects)
    assert any(fields["acceptance_rate"] for fields in greedy.objects)


async def test_thin_client_shows_text(target: ServerProcess) -> None:
    """A client without a draft prints prompt and continuation, as it streams, then figures; logs go to stderr."""
    result = await run_command(
        *("--role", "fused_client", "--port", str(target.port), "--prompt", "the wind", "--max_new_tokens", "5"),
        *("--deadline_s", "inf"),  # gRPC took it for a time that is over
    )
    expected = await complete(target, CompletionRequest("the wind", max_new_tokens=5))
    assert result.code == 0
    assert f"the wind{expected.text}" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("--- 1: 5 tokens in ")


async def test_a_failure_is_written_to_stderr(target: ServerProcess) -> None:
    """Standard output has only the model's text; the error of a failed prompt goes to stderr."""
    long = "long " * 100
    result = await run_command("--role", "fused_client", "--port", str(target.port), "--prompt", long)
    assert result.code == 1
    assert "failed" not in result.stdout
    assert "the prompt is too long" in result.last_line


async def test_a_draft_worker_refuses_a_non_target(models: ModelDirectories) -> None:
    """The command of a draft worker ends with an error at its start if the server it connects to is not a target.

    Regression: the worker loaded its model, and every prompt failed with "Method not found!".
    """
    async with fused_server(models.target, models.related) as fused:
        flags = ("--role", "draft", "--model", str(models.related), "--port", str(fused.port))
        prompts, serving = await asyncio.gather(
            run_command(*flags, "--prompt", "x"), run_command(*flags, "--serve", str(free_port()))
        )
    for result in (prompts, serving):
        assert result.code == 1
        assert "a fused server answers there" in result.last_line
        assert "--role target" in result.last_line
        assert "slots of" not in result.stderr, "no model was loaded for it"


async def test_a_taken_port_is_an_error_before_a_model_loads(target: ServerProcess, models: ModelDirectories) -> None:
    result = await run_command("--role", "target", "--model", str(models.target), "--port", str(target.port))
    assert result.code == 2
    assert f"cannot listen on 127.0.0.1:{target.port}" in result.last_line
    assert "slots of" not in result.stderr


def test_one_model_alone_prints_each_token(models: ModelDirectories, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that runs one model without a server prints a line per token, then the text, or one JSON object."""
    flags = ["--model", str(models.target), "--prompt", "in the", "--max_new_tokens", "6"]
    assert main(["--role", "verify_draft", *flags, "--format", "json"]) == 0
    as_json = CommandResult(0, capsys.readouterr().out, "")
    assert_json(as_json, ["in the"])
    (fields,) = as_json.objects
    assert main(["--role", "verify_target", *flags, "--format", "tokens"]) == 0
    text = capsys.readouterr().out
    rows = [line.split(maxsplit=2) for line in text.splitlines() if line[:5].strip().isdigit()]
    assert [int(row[1]) for row in rows] == fields["token_ids"]
    assert f"in the{fields['text']}" in text


def test_a_pair_alone_answers_as_its_target_does(models: ModelDirectories, capsys: pytest.CaptureFixture[str]) -> None:
    """One command completes a prompt with target and draft, without a server, and gives the target's own tokens.

    Regression: to try a pair of models on one prompt, a user needed a server and a client in two terminals.
    """
    flags = ["--prompt", "in the", "--max_new_tokens", "6", "--temperature", "0.8", "--seed", "3", "--format", "json"]
    pair = ["--target_model", str(models.target), "--draft_model", str(models.related)]
    answers = []
    for role, chosen in (("verify_target", ["--model", str(models.target)]), ("verify_fused", pair)):
        assert main(["--role", role, *chosen, *flags]) == 0
        (fields,) = CommandResult(0, capsys.readouterr().out, "").objects
        answers.append(fields["token_ids"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("asked", [("--prompt", "x"), ("--serve", "0")])
def test_the_bundled_draft_beside_another_target_names_the_ways_out(
    target: ServerProcess, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]
) -> None:
    """If the target has another tokenizer than the bundled draft, the error names both models and what to do instead.

    Regression: the error had two hashes, but neither the name of the bundled draft nor what to do instead.
    """
    assert main(["--role", "draft", "--port", str(target.port), *asked]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "need one vocabulary" in error
    assert error.endswith(
        "the draft is the bundled one, and there are: --model DIR, a smaller model with the target's tokenizer; "
        "--model ngram --tokenizer DIR, no model"
    )
