"""Checks of vLLM's configuration: what this project cannot run with is refused, with what to use instead."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_same_text
from specdec.inference.errors import ConfigError
from specdec.inference.request import Noise
from specdec.inference.vllm import hooks, options
from specdec.inference.vllm.frames import Served
from specdec.inference.vllm.hooks import VARIABLE, Hooks
from specdec.inference.vllm.link import Place, default_folder
from specdec.inference.vllm.translation import KEY


@pytest.mark.parametrize(
    ("missing", "way"),
    [({"V1": [], "V2": ["a name"]}, f"set {VARIABLE}=0"), ({"V1": ["one"], "V2": ["another"]}, "specdec vllm_check")],
)
def test_a_server_of_vllms_own_names_the_way_to_another_runner(
    missing: dict[str, list[str]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "read_hooks", lambda: Hooks(Path(), missing, None))
    with pytest.raises(ConfigError, match=f"runner V2.*{way}"):
        options.require_usable(SimpleNamespace(use_v2_model_runner=True))


def test_the_missing_rule_of_runner_v2_is_named_with_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM would use its runner V2 but package `vllm_same_text` is missing, the error names both ways to go on.

    One is to install it, the other runner V1, which writes other texts and is never chosen without a word.
    """
    monkeypatch.setattr(hooks, "find_spec", lambda name: None)
    monkeypatch.setattr(
        options, "read_hooks", lambda: Hooks(Path(), {"V1": [], "V2": hooks._lost_by_rule(Path())}, None)
    )
    monkeypatch.setattr(os, "environ", {})
    options.prepare_environment("info")
    assert VARIABLE not in os.environ
    with pytest.raises(ConfigError, match=rf"lacks vllm_same_text .*pip install \./vllm_same_text.*set {VARIABLE}=0"):
        options.require_usable(SimpleNamespace(use_v2_model_runner=True))


def test_a_runner_with_every_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "read_hooks", lambda: Hooks(Path(), {"V1": ["one"], "V2": []}, None))
    options.require_usable(SimpleNamespace(use_v2_model_runner=True))


def kept(dtype: str = "float32", device: str = "cuda", **others: object) -> SimpleNamespace:
    """Return a configuration of vLLM that would be accepted; `dtype`, `device` and `others` change it."""
    model = SimpleNamespace(
        model="a/model",
        dtype=f"torch.{dtype}",
        is_hybrid=False,
        is_attention_free=False,
        logprobs_mode="raw_logprobs",
        runner_type="generate",
    )
    device_config = SimpleNamespace(device_type=device)
    scheduler_config = SimpleNamespace(async_scheduling=False)
    fields: dict[str, Any] = {"model_config": model, "device_config": device_config, "use_v2_model_runner": False}

    fields["scheduler_config"] = scheduler_config
    ours = SimpleNamespace(**options.parts(8)["speculative_config"])
    return SimpleNamespace(**{**fields, "speculative_config": ours, **others})


@pytest.mark.parametrize(
    ("dtype", "flag", "warned"),
    [("bfloat16", "0", True), ("float16", "", True), ("bfloat16", "1", False), ("float32", "0", False)],
)
def test_rounding_that_may_change_tokens_is_named_at_the_start(
    dtype: str, flag: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(options.INVARIANT, flag)
    options.require_kept(kept(dtype))
    assert ("--exact always prevents it" in caplog.text) == warned


def test_the_flag_that_fails_on_a_cpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's flag for equal bits (VLLM_BATCH_INVARIANT) is refused on a CPU, with an error of one line.

    Regression: the flag ended the first pass on a CPU with a TypeError of Triton.
    """
    monkeypatch.setenv(options.INVARIANT, "1")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT=1 on a CPU, where every pass fails with it: unset it"):
        options.require_kept(kept("bfloat16", "cpu"))


@pytest.mark.parametrize(("exact", "flag"), [("auto", False), ("never", False), ("always", True)])
def test_vllms_flag_is_set_by_exact_always_alone(exact: str, flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    options.prepare_environment("info", exact)
    assert options.is_invariant() == flag


@pytest.mark.parametrize("speculation", [SimpleNamespace(method="eagle3"), None])
def test_another_method_of_speculation_is_refused(speculation: SimpleNamespace | None) -> None:
    """A speculation method in place of this project's, as a later flag of `vllm serve` sets it, is refused by name.

    Regression: vLLM loaded the draft model of such a method, which was never used.
    """
    options.require_kept(kept())
    with pytest.raises(ConfigError, match=f"speculation method {getattr(speculation, 'method', None)}"):
        options.require_kept(kept(speculative_config=speculation))


def test_each_runner_has_its_noise() -> None:
    """On vLLM's runner V2 only vLLM's noise (rule for random numbers) is accepted; on V1 this project's is too."""
    v1, v2 = (SimpleNamespace(use_v2_model_runner=is_v2) for is_v2 in (False, True))
    assert [options.noise_of(v1, asked) for asked in (None, *Noise)] == [Noise.SPECDEC, *Noise]
    assert [options.noise_of(v2, asked) for asked in (None, Noise.VLLM)] == [Noise.VLLM, Noise.VLLM]
    with pytest.raises(ConfigError, match=f"--noise specdec is not valid on vLLM's runner V2.*{VARIABLE}=0"):
        options.noise_of(v2, Noise.SPECDEC)


@pytest.mark.parametrize(
    ("is_v2", "changes", "message"),
    [
        (True, {}, "the rule does not fit"),
        (False, {"watermark_config": object()}, "a watermark"),
        (False, {"logprobs_mode": "processed_logprobs"}, "take raw_logprobs"),
    ],
    ids=["V2", "watermark on V1", "log-probabilities on V1"],
)
def test_another_choice_of_tokens_is_refused(
    is_v2: bool, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that changes which tokens vLLM chooses is refused.

    On runner V2 this is what package `vllm_same_text` names; on V1 a watermark, or log-probabilities that are not raw.
    """
    monkeypatch.setattr(vllm_same_text, "faults", lambda config: iter(["the rule does not fit"]))
    config = kept(use_v2_model_runner=is_v2, **changes)
    config.model_config.logprobs_mode = changes.get("logprobs_mode", "raw_logprobs")
    with pytest.raises(ConfigError, match=message):
        options.require_kept(config)


@pytest.mark.parametrize("mailbox", [None, Path("/box")])
def test_a_core_of_vllms_own_server_finds_its_pool(mailbox: Path | None) -> None:
    """An engine core of vLLM's own server finds its pool of draft workers in the given folder, or in the default one.

    Regression: if no folder was given, the configuration lacked it, and vLLM did not start.
    """
    place = Place(**options.serve_parts(8, mailbox)["additional_config"][KEY]).of_pool(Served("m", b"", [], 9, 9, 9))
    assert place.path == str((mailbox or default_folder()) / "core")
