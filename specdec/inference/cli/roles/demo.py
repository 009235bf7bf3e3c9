"""Role demo: shows the service at work on the bundled models, in servers that it starts and stops itself."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.inference.config import SERVICE_FLAGS, ObserveConfig
from specdec.inference.settings import group, setting


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of --role demo.

    Attributes:
        scene: speed: a draft worker and a target beside the target alone, with a table of figures; failover: a target
            is killed while its answer streams, and another one goes on.
    """

    scene: str = setting("speed", "scene", choices=("speed", "failover"), section="demo")
    observe: ObserveConfig = group(
        ObserveConfig, role="demo", log_level="error", without=(*SERVICE_FLAGS, "trace", "profile")
    )


async def run(settings: DemoSettings) -> int:
    """Run the scene; return 1 if tokens differ where they must be equal, else 0."""
    from specdec.inference.cli.demo import failover, speed

    return await (speed.run() if settings.scene == "speed" else failover.run())
