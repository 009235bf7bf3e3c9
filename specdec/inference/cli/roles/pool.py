"""Role pool: lets a `vllm serve` on the same machine use draft workers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specdec.inference.config import ObserveConfig, ServerConfig
from specdec.inference.errors import ConfigError
from specdec.inference.settings import group, setting


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of --role pool, which lets a `vllm serve` on the same machine use draft workers.

    Attributes:
        mailbox: folder, of this user alone, in which pool and vLLM find each other (default: /tmp/specdec-UID).
    """

    mailbox: Path | None = setting(None, "--mailbox DIR", section="pool")
    server: ServerConfig = group(
        ServerConfig,
        without=("max_waiting", "drain", "lookup", "replay", "prompt_share", "pass_timeout_s"),
    )
    observe: ObserveConfig = group(ObserveConfig, role="pool")


async def run(settings: PoolSettings) -> int:
    if find_spec("msgspec") is None:
        raise ConfigError("the pool needs msgspec: take vLLM's environment, or `pip install msgspec`")
    from specdec.inference.serving.pool import serve_pool
    from specdec.inference.vllm.link import default_folder

    await serve_pool(settings.mailbox or default_folder(), settings.server, settings.observe)
    return 0
