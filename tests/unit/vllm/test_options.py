"""Configuration of vLLM: a runner that lacks needed names is refused, with what to use instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.inference.errors import ConfigError
from specdec.inference.vllm import options
from specdec.inference.vllm.hooks import VARIABLE, Hooks


@pytest.mark.parametrize(
    ("missing", "way"),
    [({"V1": [], "V2": ["a name"]}, f"set {VARIABLE}=0"), ({"V1": ["one"], "V2": ["another"]}, "specdec vllm-check")],
)
def test_a_server_of_vllms_own_names_the_way_to_another_runner(
    missing: dict[str, list[str]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "read_hooks", lambda: Hooks(Path(), missing, None))
    with pytest.raises(ConfigError, match=f"runner V2.*{way}"):
        options.require_usable(SimpleNamespace(use_v2_model_runner=True))


def test_a_runner_with_every_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "read_hooks", lambda: Hooks(Path(), {"V1": ["one"], "V2": []}, None))
    options.require_usable(SimpleNamespace(use_v2_model_runner=True))


def configured(**others: object) -> SimpleNamespace:
    """Return the part of vLLM's configuration that `require_kept` reads, with other values for some fields."""
    model = SimpleNamespace(model="m", is_hybrid=False, is_attention_free=False, logprobs_mode="raw_logprobs")
    model.runner_type = "generate"
    ours = SimpleNamespace(**options.parts(8)["speculative_config"])
    scheduler = SimpleNamespace(async_scheduling=False)
    return SimpleNamespace(
        **{"model_config": model, "speculative_config": ours, "scheduler_config": scheduler, **others}
    )


@pytest.mark.parametrize("speculation", [SimpleNamespace(method="eagle3"), None])
def test_another_method_of_speculation_is_refused(speculation: SimpleNamespace | None) -> None:
    """A method that replaces this project's, as a later flag of `vllm serve` does, is refused by name.

    Regression: vLLM loaded such a draft model, and nothing ever asked it.
    """
    options.require_kept(configured())
    with pytest.raises(ConfigError, match=f"speculation method {getattr(speculation, 'method', None)}"):
        options.require_kept(configured(speculative_config=speculation))
