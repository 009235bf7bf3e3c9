"""Tests that the library, the package `specdec`, gives a server's tokens, in scripts and in event loops."""

from __future__ import annotations

import asyncio
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import specdec
from examples import library
from specdec.inference import VERSION
from specdec.inference.config import ROOT
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.request import SamplingParams
from specdec.inference.serving.processes import ServerProcess
from specdec.inference.workers.completing.results import NUM_PAIRS
from specdec.inference.workers.completion import CompletionRequest
from specdec.parameters import Parameters
from tests.conftest import ModelDirectories
from tests.support.servers import complete_all

pytestmark = pytest.mark.slow

PROMPTS = ["the wind and the sea", "a house", "once"] * 2


@pytest.fixture(scope="module")
def llm(models: ModelDirectories) -> Iterator[specdec.LLM]:
    with specdec.LLM(models.chat_target, models.related, batch=2, threads=1, adaptive_gamma=False) as llm:
        yield llm


async def test_everything_gives_a_servers_tokens(
    llm: specdec.LLM, models: ModelDirectories, target: ServerProcess
) -> None:
    """LLM, Client, AsyncLLM and AsyncClient all give a server's tokens, with a draft model or without one.

    The blocking classes also work while an event loop runs in their thread.
    """
    requests = [CompletionRequest(each, SamplingParams(temperature=0.9), 7, max_new_tokens=20) for each in PROMPTS]
    served = [completion.token_ids for completion in await complete_all(target, requests)]
    parameters: Parameters = {"temperature": 0.9, "seed": 7, "max_new_tokens": 20}
    assert [result.token_ids for result in llm.generate(PROMPTS, **parameters)] == served
    with specdec.Client(target.address) as client:
        assert [result.token_ids for result in client.generate(PROMPTS, **parameters)] == served
    async with specdec.AsyncLLM(models.chat_target, threads=1) as alone:
        assert [result.token_ids for result in await alone.generate(PROMPTS, **parameters)] == served
        parts = [part async for part in alone.stream(PROMPTS[0], **parameters)]
        assert [token_id for part in parts for token_id in part.token_ids] == served[0]
    async with specdec.AsyncClient(target.address) as asked:
        assert [result.token_ids for result in await asked.generate(PROMPTS, **parameters)] == served


def test_a_result_has_text_ids_acceptance_and_timings(llm: specdec.LLM) -> None:
    (result,) = llm.generate(PROMPTS[0], max_new_tokens=20, logprobs=1)
    assert (len(result.token_ids), len(result.logprobs)) == (20, 20)
    assert result.stats.num_draft_tokens > 0
    assert 0 < result.stats.ttft_s <= result.stats.end_to_end_s
    parts = list(llm.stream(PROMPTS[0], max_new_tokens=20))
    assert "".join(part.text for part in parts) == result.text
    assert sum(part.num_accepted_tokens for part in parts) <= sum(part.num_draft_tokens for part in parts)


def test_prompts_may_be_ids_and_chats(llm: specdec.LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    mixed: list[Any] = [[5, 6, 7], messages]
    by_ids, by_chat = llm.generate(mixed, max_new_tokens=4)
    assert [len(each.token_ids) for each in (by_ids, by_chat)] == [4, 4]
    assert llm.generate(messages, max_new_tokens=4)[0].token_ids == by_chat.token_ids
    assert llm.generate([5, 6, 7], max_new_tokens=4)[0].token_ids == by_ids.token_ids


def test_parameters_are_those_of_the_command_line(llm: specdec.LLM) -> None:
    fields: Parameters = {
        "structured_outputs": {"regex": "[ab]{3}"},
        "logit_bias": {5: -1.0},
        "stop": "zzz",
        "stop_token_ids": [3],
        "max_new_tokens": 20,
    }
    (result,) = llm.generate("x", **fields)
    assert re.fullmatch("[ab]{3}", result.text)
    with pytest.raises(ConfigError, match="no parameter is called nonsense"):
        llm.generate("x", nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="temperature -1"):
        llm.generate("x", temperature=-1)
    with pytest.raises(InvalidRequestError, match="context length"):
        llm.generate(["x", "the " * 3000])


def test_wrong_settings_are_named() -> None:
    for name, meant in {"max_model_len": "sequence_length", "bacth": "batch"}.items():
        with pytest.raises(ConfigError, match=f"LLM has no setting {name} .did you mean {meant}"):
            specdec.LLM(None, None, **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="LLM without a draft has no setting gamma"):
        specdec.LLM(specdec.BUNDLED_TARGET, gamma=3)
    with pytest.raises(ConfigError, match="LLM has no setting temperature"):  # it had no effect
        specdec.LLM(temperature=1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="batch 0"):
        specdec.LLM(batch=0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"batch": "many"}, "a whole number"),
        ({"prefix_caching": 1}, "True or"),
    ]
    for settings, expected in wrong:
        with pytest.raises(ConfigError, match=f"is not valid: {expected}"):
            specdec.LLM(**settings)
    with pytest.raises(ConfigError, match="no such directory"):
        specdec.LLM("nowhere")


NO_PROMPTS: list[Any] = [None, 5, {}, b"x", [1, "a"], [None]]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"prompts": value}, "prompt.* is not valid: a text") for value in NO_PROMPTS),
    ({"prompts": [{"role": "user"}]}, r"messages\[0\]\.content"),
    *(({name: "a"}, f"{name} 'a' is not valid: a whole number") for name in ("seed", "max_new_tokens", "logprobs")),
    ({"temperature": "1"}, "temperature '1' is not valid: a number"),
    ({"stop": 3}, "stop 3 is not valid: a text, or a list"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids .* a list of token ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias .* token ids with their biases"),
    ({"structured_outputs": {"regexp": "x"}}, r"structured_outputs has no regexp \(did you mean regex"),
    ({"structured_outputs": {}}, "structured_outputs {} is not valid: one of json, regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs regex 5 is not valid: a text"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_a_value_of_another_type_is_named_in_one_line(llm: specdec.LLM, given: dict[str, Any], message: str) -> None:
    """A parameter's value of a wrong type gets an error of one line that names the parameter.

    Regression: such values led to a TypeError, KeyError or ExceptionGroup of inner code, or to Pydantic's text.
    """
    with pytest.raises(specdec.errors.InvalidRequestError, match=message) as caught:
        llm.generate(**{"prompts": "x", "max_new_tokens": 2, **given})
    assert "\n" not in str(caught.value)


def test_a_misspelt_parameter_names_the_one_meant(llm: specdec.LLM) -> None:
    for name, meant in {"max_tokens": "max_new_tokens", "temprature": "temperature"}.items():
        with pytest.raises(specdec.errors.ConfigError, match=f"called {name} .did you mean {meant}"):
            llm.generate("x", **{name: 1})  # type: ignore[arg-type]


def test_names_show_themselves_before_they_are_used() -> None:
    """Tab completion and help() show the names and parameters of the library before it is first used.

    Regression: completion by Tab found `Path` and `sys` but no LLM, and help showed `**parameters`.
    """
    code = "import sys, specdec; print(dir(specdec), specdec.__version__, 'specdec.inference.cli' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "'LLM'" in run.stdout
    assert "Path" not in run.stdout
    assert run.stdout.rstrip().endswith(f"{VERSION} False")
    for method in (specdec.LLM.generate, specdec.LLM.stream, specdec.AsyncLLM.compare):
        assert {"max_new_tokens", "temperature", "structured_outputs"} <= signature(method).parameters.keys()
        shown = list(signature(method).parameters)
        assert shown.index("max_new_tokens") < shown.index("cache_salt"), "the fields that few set came before it"
    assert {"batch", "dtype", "gamma"} <= signature(specdec.LLM).parameters.keys()
    assert {"tls_ca", "batch"} <= signature(specdec.Client).parameters.keys()


def test_a_result_shows_itself_shortly(llm: specdec.LLM) -> None:
    """The repr of a result, which a notebook shows, is short.

    Regression: a notebook printed every time of every pass, some 3,000 characters.
    """
    (result,) = llm.generate("<b> & the sea", max_new_tokens=30)
    assert len(repr(result)) < 300
    shown = result._repr_html_()
    assert "&lt;b&gt; &amp; the sea" in shown
    text = re.sub(r"<[^>]*>", "", shown.partition("</div>")[0])
    assert html.unescape(text) == f"<b> & the sea{result.text}"
    drafted = sum(part.num_accepted_tokens for part in llm.stream("<b> & the sea", max_new_tokens=30))
    assert sum(own for _, own in result.pieces) == drafted


def test_a_comparison_has_both_answers_side_by_side(llm: specdec.LLM) -> None:
    comparison = llm.compare("a house", max_new_tokens=20, temperature=0.9)
    assert comparison.is_exact
    assert comparison.drafted[0].stats.num_draft_tokens > 0 == comparison.alone[0].stats.num_draft_tokens
    assert len(comparison.speed_ups) == len(comparison.drafted) == NUM_PAIRS
    assert comparison.load is not None
    assert "the same tokens" in repr(comparison)
    assert comparison._repr_html_().count("<td") == 2
    comparison.alone[0].token_ids[-1] += 1
    assert "OTHER tokens" in repr(comparison)


async def test_an_asynchronous_one_opens_without_a_block(models: ModelDirectories) -> None:
    """An AsyncLLM can be opened without `async with`, which cannot span several cells of a notebook."""
    llm = specdec.AsyncLLM(models.target, "none", threads=1)
    try:
        assert await llm.open() is await llm.open()
        assert len((await llm.generate("x", max_new_tokens=3))[0].token_ids) == 3
    finally:
        await llm.close()


INTERRUPTED = """
import sys, specdec
llm = specdec.LLM(sys.argv[1], threads=1)
stream = llm.stream("x", max_new_tokens=100, ignore_eos=True)
next(stream)
raise KeyboardInterrupt
"""


def test_an_interrupted_script_has_one_traceback(models: ModelDirectories) -> None:
    """A script that is ended by Ctrl-C prints one traceback, that of KeyboardInterrupt.

    Regression: executors ended before the models, so that a pass logged "cannot schedule new futures".
    """
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(models.target)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.stderr.count("Traceback") == 1, run.stderr
    assert run.stderr.rstrip().endswith("KeyboardInterrupt")


def test_a_stream_that_is_left_frees_its_slot(llm: specdec.LLM) -> None:
    for _ in range(4):  # more than there are slots
        stream = llm.stream(PROMPTS[0], max_new_tokens=100)
        assert next(stream).token_ids
        stream.close()
    assert len(llm.generate(PROMPTS, max_new_tokens=2)) == len(PROMPTS)


def test_a_fork_of_a_process_with_models_is_an_error(llm: specdec.LLM, models: ModelDirectories) -> None:
    """In a forked process, the models of its parent give an error: their threads are missing, so calls would hang."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        for use in (lambda: llm.generate("x"), lambda: specdec.LLM(models.target)):
            try:
                use()
            except ConfigError as exc:
                os.write(writing, f"{exc}\n".encode())
        llm.close()
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    assert (status, len(lines)) == (0, 2)
    assert all("which has opened models already" in line and "spawn" in line for line in lines)
    assert len(llm.generate("x", max_new_tokens=2)) == 1, "the parent goes on"


FORKING = """
import os, sys, specdec
if os.fork() == 0:
    llm = specdec.LLM(sys.argv[1], threads=1)
    assert len(llm.generate("x", max_new_tokens=3)[0].token_ids) == 3
    sys.exit(0)  # which closes it
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_fork_may_open_models_if_its_parent_has_none(models: ModelDirectories) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(models.target)], check=True, cwd=ROOT, timeout=120)


def test_a_closed_or_unopened_model_is_an_error(models: ModelDirectories) -> None:
    with specdec.LLM(models.target, threads=1) as llm:
        pass
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("x")
    unopened = specdec.AsyncLLM(models.target)
    with pytest.raises(ConfigError, match="async with"):
        asyncio.run(unopened.generate("x"))


def test_the_example_runs(capfd: pytest.CaptureFixture[str]) -> None:
    library.main()
    output = capfd.readouterr().out
    assert "1, 2, 3, 4, 5, 6, 7" in output
    assert re.search(r"^ \d{2,4}$", output, re.MULTILINE)


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 5
    file = tmp_path / "page.py"
    file.write_text("\n".join(examples))
    run = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == 0, run.stderr
    assert "5, 6, 7" in run.stdout
