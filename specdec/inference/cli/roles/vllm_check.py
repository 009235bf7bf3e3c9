"""Role vllm_check: reports from vLLM's sources whether the installed vLLM has the names that this project needs."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.inference.config import SERVICE_FLAGS, ObserveConfig
from specdec.inference.settings import group
from specdec.inference.vllm.hooks import VARIABLE, Hooks, installed, read_hooks


@dataclass(frozen=True, slots=True)
class VllmCheckSettings:
    """Settings of --role vllm_check, which reports whether the installed vLLM can be a target's engine."""

    observe: ObserveConfig = group(ObserveConfig, role="vllm_check", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: VllmCheckSettings) -> int:
    """Print a report; return 0 if the installed vLLM, which is not imported, can be a target's engine, else 1."""
    hooks = read_hooks()
    if hooks is None:
        _show("vLLM", "not installed here")
        _show(
            "do", "pip install . in a clone, with the pip of vLLM's own environment, and run this there (docs/vllm.md)"
        )
        return 1
    _show("vLLM", f"{installed()} in {hooks.place}")
    for runner, missing in hooks.missing.items():
        _show(f"runner {runner}", f"lacks {len(missing)} names:" if missing else "has every name that specdec needs")
        for name in missing:
            _show("", name)
    _show("taken", _taken(hooks))
    _show("do", _advice(hooks))
    return 0 if hooks.usable else 1


def _taken(hooks: Hooks) -> str:
    if not hooks.usable:
        return "none"
    if hooks.asked is not None:
        return f"{hooks.asked}, as {VARIABLE} says"
    if hooks.usable == ["V1"]:
        return f"V1; where vLLM takes V2, which is its default with Triton, a start needs {VARIABLE}=0"
    return "V2 where vLLM takes it by default, which needs Triton; else V1" if "V1" in hooks.usable else "V2"


def _advice(hooks: Hooks) -> str:
    if hooks.usable:
        return "nothing: specdec target --engine vllm --model DIR"
    others = [each for each, missing in hooks.missing.items() if not missing]
    return f"unset {VARIABLE}: runner {others[0]} can be taken" if others else "take a version of docs/vllm.md's table"


def _show(what: str, text: str) -> None:
    print(f"{what:10}{text}", flush=True)
