"""Flags and configuration files for backend neuron lead to the compiled models that they describe."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.backends.neuron.graphs.parameters import check_names
from specdec.inference.backends.neuron.graphs.settings import fused_arguments, slot_arguments
from specdec.inference.cli.app import main
from specdec.inference.cli.roles.draft import proposer_config
from specdec.inference.cli.roles.registry import parser_of, settings_of
from specdec.inference.cli.roles.worker import WorkerSettings, with_branches
from specdec.inference.config import DEFAULT_BRANCHES, ROOT, ProposerConfig
from specdec.inference.serving.models import LoadingSettings
from tests.conftest import ModelDirectories
from tests.support.nxdi_parameters import KNOWN

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
TP_DEGREES = {
    "llama3.1-8b_llama3.2-1b_trn1": 2,
    "qwen3-32b_qwen3-0.6b_trn2": 64,
    "qwen3-32b_qwen3-1.7b_trn2": 32,
    "llama3.1-405b_trn2": 64,
    "llama3.1-405b-fp8_llama3.2-1b_trn2": 64,
}
ALONE = "llama3.1-405b_trn2"
"""Name of the file in CONFIGS that configures a target without a draft."""
COMMON = ("--backend", "neuron", "--dtype", "float32", "--sequence_length", "48", "--batch", "2")


def parsed(role: str, *arguments: str | Path) -> Namespace:
    return parser_of(role).parse_args([str(argument) for argument in arguments])


def run(role: str, *arguments: str | Path) -> int:
    return main(["--role", role, *map(str, arguments)])


@pytest.mark.parametrize("role", ["verify_target", "verify_draft"])
def test_one_model_alone_prints_its_own_tokens(
    models: ModelDirectories, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    flags = ("--model", models.target, "--prompt", "the wind", "--max_new_tokens", "6", "--format", "json")
    assert run(role, *flags, *COMMON, "--neuron_cores", "2") == 0
    on_neuron = json.loads(capsys.readouterr().out)
    assert run("verify_target", *flags, "--sequence_length", "48", "--threads", "1") == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == on_neuron["token_ids"]


def draft_of(*arguments: str) -> ProposerConfig:
    """Return the settings of the draft that `arguments` describe: the role, draft or worker, and then its flags."""
    settings = settings_of(arguments[0], arguments[1:])
    if isinstance(settings, WorkerSettings):
        return with_branches(settings.model, settings.branches)
    return proposer_config(settings)


@pytest.mark.parametrize("flags", [("draft",), ("worker", "--attach", "localhost:1"), ("draft", "--schedule", "sync")])
def test_a_draft_without_fork_takes_no_branch_slots(models: ModelDirectories, flags: tuple[str, ...]) -> None:
    """A draft on backend neuron, which cannot copy slots of the KV cache, gets no slots for alternative proposals.

    Regression: with `--batch 2` a draft took four times the memory, and did not match its model compiled
    ahead.
    """
    drafts = (*flags, "--model", str(models.related))
    assert draft_of(*drafts, *COMMON).branches == 0
    assert draft_of(*drafts, "--backend", "torch").branches == (0 if "sync" in flags else DEFAULT_BRANCHES)


def test_compile_without_a_model_or_a_compiler(models: ModelDirectories, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compile") == 2
    assert "nothing to compile" in capsys.readouterr().err
    assert run("compile", "--model", models.target, "--backend", "onnx") == 2
    assert "backend onnx compiles nothing: neuron and torch do" in capsys.readouterr().err


def test_other_backends_take_no_neuron_settings(models: ModelDirectories, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--neuron_config", '{"fused_qkv": true}'), ("--device_sampling",)):
        assert run("verify_target", "--model", models.target, *flags) == 2
        assert "backend auto takes neither" in capsys.readouterr().err


def test_neuron_config_must_be_an_object(models: ModelDirectories, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", "[1]"):
        with pytest.raises(SystemExit) as caught:
            parsed("target", "--neuron_config", text)
        assert caught.value.code == 2
    assert "is not a JSON object" in capsys.readouterr().err


def test_names_of_neuron_config_may_have_dashes(tmp_path: Path) -> None:
    """Names in --neuron_config may have dashes in place of underscores.

    Regression: AWS's JSON for Llama 3.1 405B has dashes, and was refused with a hint to use underscores.
    """
    file = tmp_path / "config.toml"
    file.write_text("[neuron_config]\nfused-qkv = true\n")
    args = parsed("target", "--config", file, "--neuron_config", '{"quantized-mlp-kernel-enabled": true}')
    assert args.neuron_config == {"fused_qkv": True, "quantized_mlp_kernel_enabled": True}


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        'backend = "neuron"\nbatch = 3\ntp_degree = 2\nprofile = true\n'
        "[neuron_config]\nfused_qkv = true\nlm_head_pad = false\n[target]\ngamma = 6\n[draft]\ngamma = 2\n"
    )
    overrides = ("--batch", "4", "--neuron_config", '{"lm_head_pad": true}')
    args = parsed("target", "--config", file, *overrides)
    assert (args.backend, args.batch, args.tp_degree, args.gamma, args.profile) == ("neuron", 4, 2, 6, True)
    assert args.neuron_config == {"fused_qkv": True, "lm_head_pad": True}
    assert parsed("draft", f"--config={file}").gamma == 2
    assert parsed("target").neuron_config == {}, "defaults are not changed by earlier files"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.toml", "batch = ", "cannot be read"),
        ("config.json", "[1]", "an object of flags is expected"),
        ("config.json", '{"target": {"batchh": 1}}', "role target has no flag batchh"),
        ("config.json", '{"batchh": 1}', "no role has a flag batchh"),
        ("config.json", '{"batch": "many"}', "invalid int value"),
        ("none.json", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parsed("target", "--config", file)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "role"),
    [
        pytest.param(file, role, id=f"{file.stem}-{role}")
        for file in CONFIGS
        for role in ("fused_target", "compile", "target", "draft")
        if file.stem in TP_DEGREES and (file.stem, role) != (ALONE, "fused_target")
    ],
)
def test_a_tutorial_s_file_is_a_valid_configuration(models: ModelDirectories, file: Path, role: str) -> None:
    flags = ("--config", str(file), "--neuron_config", '{"quantized_checkpoints_path": "there"}')
    settings = settings_of(role, flags)
    gamma = 0 if role == "draft" else settings.gamma
    named = settings.models if role in ("fused_target", "compile") else settings.model
    loading: LoadingSettings = replace(named.loading, beyond_positions=True)  # the test's model has few
    config = loading.target(models.target, num_threads=1, neuron=loading.neuron_options(gamma=gamma))
    check_names(config.neuron.overrides, KNOWN)
    arguments: dict[str, Any] = (fused_arguments if role == "fused_target" else slot_arguments)(
        config, length=loading.sequence_length or 0
    )
    assert arguments["tp_degree"] == TP_DEGREES[file.stem]
    if role == "fused_target" and "trn2" in file.stem:
        assert arguments["speculation_length"] == 7
