"""Default values of request parameters, from a server's flags and from the checkpoint's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.inference.cli.roles.fused_target import FusedSettings
from specdec.inference.cli.roles.registry import parser_of, settings_of
from specdec.inference.cli.roles.target import TargetSettings
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.request import RequestDefaults


def defaults(model: Path, *flags: str, role: str = "target") -> RequestDefaults:
    settings: TargetSettings | FusedSettings = settings_of(role, flags)
    return settings.defaults.of(model)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Save a generation_config.json with values like Qwen3's, and no other file; return its folder."""
    stored = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    return tmp_path


TEXTBOOK = (
    "--role target --model M --port 50051 --sequence_length 128 --batch 2 --profile --top_p 1.0",
    "--role draft --model M --target_host 10.0.0.2 --port 50051 --prompt_text p.txt --profile --top_p 1.0 "
    "--temperature 0.9 --gamma 4 --max_new_tokens 128",
    "--role fused_target --draft_model D --target_model T --sequence_length 128 --batch 2 --tp_degree 2 "
    "--speculation_length 5 --temperature 1.0 --top_p 0.9 --max_new_tokens 128",
    "--role fused_client --target_host 10.0.0.2 --port 50051 --prompt_text p.txt --temperature 0.9 --top_p 1.0 "
    "--speculation_length 5 --profile",
    "--role verify_target --model M --prompt x --max_new_tokens 10 --sequence_length 128",
    "--role verify_draft --model M --prompt x --max_new_tokens 10 --sequence_length 128",
)


@pytest.mark.parametrize("line", TEXTBOOK)
def test_every_command_of_the_textbook_parses(line: str) -> None:
    """The commands in `TEXTBOOK`, as a textbook prints them, are accepted unchanged.

    Regression: `--role target --sequence_length 128 --batch 2 --profile --top_p 1.0` ended with exit code 2.
    """
    _, role, *rest = line.split()
    parser_of(role).parse_args(rest)


@pytest.mark.parametrize("role", ["target", "fused_target"])
def test_the_checkpoint_speaks_where_the_flags_do_not(model: Path, role: str) -> None:
    said = defaults(model, "--temperature", "0", "--max_new_tokens", "7", role=role)
    assert said == RequestDefaults(temperature=0.0, top_k=20, top_p=0.95, max_new_tokens=7)


def test_a_checkpoints_defaults_can_be_ignored(model: Path) -> None:
    assert defaults(model, "--generation_config", "none") == RequestDefaults()


def test_a_checkpoint_without_the_file(tmp_path: Path) -> None:
    assert defaults(tmp_path) == RequestDefaults()


@pytest.mark.parametrize("stored", [{"temperature": -1.0}, {"top_p": "high"}, {"max_new_tokens": 0}])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, stored: dict[str, object]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"generation_config\.json.*--generation_config none"):
        defaults(tmp_path)


def test_a_flag_outside_its_range_is_named(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"top_p 1\.5"):
        defaults(model, "--top_p", "1.5")
