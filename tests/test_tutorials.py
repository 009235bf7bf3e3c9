"""Tests that every command line in docs/tutorials is valid for its program.

This project's own commands are checked by its parsers, bodies of requests by the gateway's schema, and arguments of
curl and LLMPerf by a list. Any other program must be listed in this file.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.device_report import __main__ as device_report
from specdec.comparison.plan import flags as comparison
from specdec.comparison.report import diff
from specdec.comparison.study.flags import study_parser
from specdec.inference.backends.neuron.graphs.parameters import check_names
from specdec.inference.backends.neuron.graphs.settings import fused_arguments, slot_arguments, target_arguments
from specdec.inference.cli.config_file import ConfigFileParser
from specdec.inference.cli.roles.registry import ROLES, parser_of, settings_of
from specdec.inference.config import BUNDLED_TARGET, ROOT, model_name
from specdec.inference.errors import ConfigError
from specdec.inference.gateway.bodies.schema import ChatBody, CompletionBody
from tests.support.nxdi_parameters import KNOWN

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FOREIGN = {
    *("ls", "source", "docker", "git", "cd", "pip", "neuron-ls", "hf", "export", "rm", "echo"),
}
"""Programs of others that pages may call; their arguments are not checked."""
LLMPERF = {
    *("model", "mean-input-tokens", "stddev-input-tokens", "mean-output-tokens", "stddev-output-tokens", "llm-api"),
    *("num-concurrent-requests", "timeout", "max-num-completed-requests", "additional-sampling-params", "results-dir"),
    *("metadata", "tokenizer"),
}
"""Flags of LLMPerf's token_benchmark_ray.py at the commit in deploy/llmperf/run.sh, and one that this project adds."""
BODIES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
PAIRS = ("qwen3-32b_qwen3-0.6b_trn2", "qwen3-32b_qwen3-1.7b_trn2", "llama3.1-8b_llama3.2-1b_trn1")


def command_lines(page: Path) -> list[list[str]]:
    """Return the commands in all bash blocks of a page, each split into words as a shell does."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


LINES = [
    pytest.param(words, id=f"{page.stem}:{' '.join(words)[:60]}") for page in PAGES for words in command_lines(page)
]


def check(words: Sequence[str]) -> None:
    """Check a command line, given as words.

    Raises:
        SystemExit, ConfigError, ValueError, AssertionError: its program would refuse it, or is not known.
    """
    program, rest = words[0], list(words[1:])
    if program == "python":
        check_python(rest)
    elif program == "make":
        check_make(rest)
    elif program == "deploy/llmperf/run.sh":
        check_llmperf(rest)
    elif program == "curl":
        check_curl(rest)
    else:
        assert program in FOREIGN, f"{program} is not known here"


def check_python(words: list[str]) -> None:
    script, arguments = words[0], words[1:]
    if script == "main.py":
        check_role(arguments)
    elif (script, arguments[:1]) == ("compare_architectures.py", ["diff"]):
        diff._parser().parse_args(arguments[1:])
    elif script == "compare_architectures.py":
        is_study = arguments[0] == "study"
        parser = study_parser() if is_study else comparison.comparison_parser()
        parser.parse_args(arguments[is_study:])
    else:
        raise AssertionError(f"{script} is not known here")


def check_llmperf(words: list[str]) -> None:
    if words == ["--help"]:
        return
    values = dict(zip(words[::2], words[1::2], strict=True))
    assert {name.removeprefix("--") for name in values} <= LLMPERF
    sampling = json.loads(values["--additional-sampling-params"])
    ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], **sampling})


def check_role(arguments: Sequence[str]) -> None:
    """Check the flags of a command of this project, `--role` first; raise the errors that it would end with.

    With backend neuron, also check the settings that are derived before a model is read.
    """
    role = arguments[1]
    assert (arguments[0], role in ROLES) == ("--role", True)
    settings = settings_of(role, arguments[2:])
    models = getattr(settings, "models", getattr(settings, "model", None))
    if models is None or models.loading.backend != "neuron":
        return
    is_pair = role == "fused_target" or (role == "compile" and None not in (models.target, models.draft))
    is_draft = role == "draft" or (role == "compile" and models.target is None)
    loading, gamma = models.loading, 0 if is_draft else settings.gamma
    options = loading.neuron_options(gamma=gamma, method="fused" if is_pair else None)
    check_names(options.overrides, KNOWN)
    config = replace(loading, beyond_positions=True).target(BUNDLED_TARGET, num_threads=1, neuron=options)
    arguments_of = fused_arguments if is_pair else target_arguments if options.device_sampling else slot_arguments
    arguments_of(config, length=loading.sequence_length)


def check_make(words: list[str]) -> None:
    assert words[0] == "trainium-report"
    assert "trainium-report:" in (ROOT / "Makefile").read_text()
    arguments = shlex.split(words[1].removeprefix("ARGS=")) if len(words) > 1 else []
    for variant in device_report._variants(device_report._parse(arguments)):
        check_role(variant.arguments)


def check_curl(words: list[str]) -> None:
    path = re.sub(r"^http://localhost:\d+", "", words[0])
    if path == "/health":
        return
    BODIES[path](**json.loads(words[words.index("-d") + 1]))


@pytest.mark.parametrize("words", LINES)
def test_every_tutorial_command_is_valid_for_its_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "python main.py --role target --max-model-len 6400",
        "python main.py --role target --config configs/no_such_file.toml",
        "python main.py --role target --backend neuron --neuron_config '{\"fused_qvk\": true}'",
        "python compare_architectures.py --tp 8",
        "deploy/llmperf/run.sh --mean-tokens 3 --additional-sampling-params '{}'",
        'make trainium-report ARGS="--target_model A --draft_model B -- --tensor-parallel-size 64"',
        'curl http://localhost:8000/v1/completions -d \'{"prompt": "a", "max_tokens": -4}\'',
        "vllm serve Qwen/Qwen3-32B",
        "python main.py --role compile --config configs/llama3.1-8b_llama3.2-1b_trn1.toml "
        "--target_model A --draft_model B --gamma 0",
        "python main.py --role target --config configs/llama3.1-8b_llama3.2-1b_trn1.toml "
        "--neuron_config '{\"async_mode\": true}'",
    ],
)
def test_the_check_of_commands_refuses_invalid_ones(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises((SystemExit, ConfigError, ValueError, AssertionError)):
        check(shlex.split(line))


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: str(page.stem))
def test_requests_name_the_model_that_is_served(page: Path) -> None:
    """Requests of a tutorial name the model that its server has, since other names get status 404."""
    lines, served = command_lines(page), set()
    asked = {json.loads(words[words.index("-d") + 1]).get("model") for words in lines if "-d" in words}
    asked |= {words[words.index("--model") + 1] for words in lines if words[0] == "deploy/llmperf/run.sh"}
    for words in lines:
        if words[:2] == ["python", "main.py"] and "--http_port" in words:
            args = parser_of(words[3]).parse_args(words[4:])
            model = args.target_model if words[3] == "fused_target" else args.model
            served.add(args.served_model_name or model_name(Path(model)))
    assert len(asked) > 0
    assert asked - {None} <= served


def regime(arguments: Sequence[str]) -> tuple[bool, float | None]:
    """Return two settings of a server's flags: whether it caches prefixes, and its default temperature, else None."""
    args = parser_of(arguments[1]).parse_args(arguments[2:])
    return args.prefix_caching, args.temperature


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: str(page.stem))
def test_servers_that_are_compared_differ_in_nothing_but_drafts(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers that a tutorial compares, with and without a draft, have equal prefix caching and temperature.

    Regression: only the server without a draft cached prefixes, so that its TTFT was the time of a single pass. And
    requests with LLMPerf's '{}' were sampled at the checkpoint's temperature 0.6, while AWS's command was greedy.
    """
    monkeypatch.chdir(ROOT)
    servers = [words[2:] for words in command_lines(page) if words[:2] == ["python", "main.py"]]
    found = {regime(words) for words in servers if words[1] in ("target", "fused_target")}
    assert found == {(False, None if "8b" in page.stem else 0.0)}


def flags_of_ours() -> set[str]:
    return {"--role", *(name for role in ROLES for name in option_strings(parser_of(role)))}


def option_strings(parser: ConfigFileParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def table_rows(heading: str) -> list[tuple[str, str]]:
    """Return the rows of the table below a heading of docs/tutorials/README.md: AWS's flag, and this project's."""
    text = (ROOT / "docs" / "tutorials" / "README.md").read_text(encoding="utf-8").partition(heading)[2]
    table = text.partition("\n\n|")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in row.strip("| ").split(" | ")) for row in table.splitlines()[2:]]
    return [(row[0], row[1]) for row in rows]


@pytest.mark.parametrize("heading", ["Of `vllm serve`:", "Of NxDI's `inference_demo`"])
def test_the_tables_name_flags_that_exist(heading: str) -> None:
    rows, known = table_rows(heading), flags_of_ours()
    assert len(rows) > 15
    for _, ours in rows:
        assert set(re.findall(r"--\w+", ours)) <= known, ours
        assert set(re.findall(r"`C: (\w+)`", ours)) <= KNOWN, ours


def values_of(file: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "configs" / f"{file}.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", PAIRS)
def test_both_sides_of_a_pair_draft_equally(file: str) -> None:
    """A tutorial's draft worker proposes as many tokens as its target verifies in one pass.

    Regression: drafts proposed 8 tokens by default to targets compiled for 6 and 4, which took two passes.
    """
    values = values_of(file)
    assert values["draft"]["gamma"] == values["target"]["gamma"] == values["fused_target"]["gamma"] - 1
    assert values["compile"]["gamma"] == values["fused_target"]["gamma"]


def test_requests_of_the_tutorials_fit_the_compiled_lengths() -> None:
    for file, tokens in (
        ("qwen3-32b_qwen3-0.6b_trn2", 128 + 512),
        ("qwen3-32b_qwen3-1.7b_trn2", 64 + 600),
        ("llama3.1-405b_trn2", 10000 + 1500),
        ("llama3.1-405b-fp8_llama3.2-1b_trn2", 10000 + 1500),
        ("llama3.1-8b_llama3.2-1b_trn1", 24 + 96),
    ):
        values = values_of(file)
        width = values.get("fused_target", {}).get("gamma", 1)
        assert tokens <= values["sequence_length"] - width, file
