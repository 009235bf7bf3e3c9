"""Flags of the engines: those after `--` are vLLM's, and settings of one engine are refused with the other."""

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
    ],
)
async def test_what_belongs_to_the_other_engine_is_refused(arguments: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        await run(settings_of("target", arguments))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it is for environments without vLLM")
async def test_without_vllm_its_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="not installed here"):
        await run(settings_of("target", ["--engine", "vllm"]))
