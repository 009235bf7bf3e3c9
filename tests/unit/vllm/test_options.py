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
    [({"V1": [], "V2": ["a name"]}, f"set {VARIABLE}=0"), ({"V1": ["one"], "V2": ["another"]}, "specdec vllm_check")],
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
