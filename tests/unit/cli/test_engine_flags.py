"""A target runs on its own engine or on vLLM: flags after `--` go to vLLM; each engine refuses the other's flags."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from specdec.inference.cli.roles.registry import settings_of
from specdec.inference.cli.roles.target import run
from specdec.inference.errors import ConfigError


def test_words_after_the_dashes_are_kept_as_they_are() -> None:
    theirs = ["--tensor-parallel-size", "4", "--config", "vllm.yaml", "-x"]
    settings = settings_of("target", ["--engine", "vllm", "--port", "7", "--", *theirs])
    assert settings.model.engine_flags == tuple(theirs)
    assert settings.server.port == 7


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--", "--quantization", "fp8"], "--engine vllm"),
        (["--noise", "vllm"], "it needs --engine vllm"),
        (["--engine", "vllm", "--batch", "3"], "--max-num-seqs"),
        (["--engine", "vllm", "--sequence_length", "99"], "--max-model-len"),
        (["--engine", "vllm", "--backend", "torch"], "vLLM is the backend"),
        (["--draft_model", "x"], "specdec worker --attach"),
        (["--engine", "vllm", "--speculation_method", "eagle3"], "take fused, eagle and eagle3 with --draft_model DIR"),
        (["--engine", "vllm", "--draft_model", "x", "--speculation_method", "medusa"], "medusa is not valid"),
    ],
)
async def test_what_belongs_to_the_other_engine_is_refused(arguments: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        await run(settings_of("target", arguments))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it is for environments without vLLM")
async def test_without_vllm_its_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="not installed here"):
        await run(settings_of("target", ["--engine", "vllm"]))


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ([], None),
        (["--draft_model", "x"], "draft_model"),
        (["--draft_model", "x", "--speculation_method", "fused"], "draft_model"),
        (["--draft_model", "x", "--speculation_method", "eagle3"], "eagle3"),
        (["--speculation_method", "mtp"], "mtp"),
    ],
)
def test_vllm_drafts_by_itself_where_its_own_speculator_is_asked_for(flags: list[str], method: str | None) -> None:
    model = settings_of("target", ["--engine", "vllm", *flags]).model
    model.check_engine()
    assert model.own_method == method
