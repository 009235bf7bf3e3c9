"""Role vllm_config: prints the settings with which `vllm serve` uses a pool of draft workers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.inference.cli.roles.pool import PoolSettings
from specdec.inference.config import DEFAULT_GAMMA, SERVICE_FLAGS, ObserveConfig
from specdec.inference.errors import ConfigError
from specdec.inference.request import GAMMA
from specdec.inference.serving.models import TargetModel
from specdec.inference.settings import group, same, setting

SECTION = "vLLM"


@dataclass(frozen=True, slots=True)
class VllmConfigSettings:
    """Settings of --role vllm_config, which prints the settings with which `vllm serve` uses a pool of draft workers.

    Attributes:
        gamma: most draft tokens of a request in a pass.
        mailbox: folder, of this user alone, in which pool and vLLM find each other (default: /tmp/specdec-UID).
        noise: noise by which a seed chooses tokens: our own, or that of stock vLLM (docs/noise.md) (default: vllm on
            vLLM's runner V2, which has no other; else specdec).
        flags: print flags for a command, not the YAML of `--config`.
        ray: print the JSON object of `engine_kwargs` in Ray Serve LLM.
    """

    gamma: int = setting(DEFAULT_GAMMA, "--gamma N", within=GAMMA, section=SECTION)
    mailbox: Path | None = same(PoolSettings, "mailbox")
    noise: str | None = same(TargetModel, "noise", help="", section=SECTION)
    flags: bool = setting(False, "--flags", section=SECTION)
    ray: bool = setting(False, "--ray", section=SECTION)
    observe: ObserveConfig = group(ObserveConfig, role="vllm_config", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: VllmConfigSettings) -> int:
    """Print the settings with which `vllm serve` uses a pool of draft workers; return exit code 0.

    Nothing else goes to stdout, so that the output can be written to a file.
    """
    from specdec.inference.vllm.options import serve_parts

    if settings.flags and settings.ray:
        raise ConfigError("--flags and --ray: take one of them")
    parts = serve_parts(settings.gamma, settings.mailbox, settings.noise)
    if settings.ray:
        print(json.dumps(parts, indent=2))
        return 0
    if settings.flags:
        print(shlex.join(word for name, value in _named(parts) for word in (f"--{name}", *_words(value))))
    else:
        print(*(f"{name}: {json.dumps(value)}" for name, value in _named(parts)), sep="\n")
    return 0


def _named(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of vLLM's flag for each setting; a setting of value False becomes the flag no-NAME."""
    for name, value in parts.items():
        flag = name.replace("_", "-")
        yield (f"no-{flag}", True) if value is False else (flag, value)


def _words(value: Any) -> list[str]:
    return [] if value is True else [value if isinstance(value, str) else json.dumps(value)]
