"""Role demo: shows the service at work on the bundled models, in servers that it starts and stops itself."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.inference.config import DEFAULT_START_TIMEOUT_S, SECONDS, SERVICE_FLAGS, ObserveConfig, usable_core_ids
from specdec.inference.settings import group, setting


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of --role demo, which shows the service at work on the bundled models.

    Attributes:
        scene: speed: a draft worker and a target beside the target alone, with a table of figures; failover: a target
            is killed while its answer streams, and another one goes on.
        start_timeout_s: longest time until all servers are ready, compiling included; a server whose log and CPU time
            stand still for 120 s ends the start sooner.
    """

    scene: str = setting("speed", "scene", choices=("speed", "failover"), section="demo")
    start_timeout_s: float = setting(DEFAULT_START_TIMEOUT_S, "--start_timeout_s S", within=SECONDS, section="demo")
    observe: ObserveConfig = group(
        ObserveConfig, role="demo", log_level="error", without=(*SERVICE_FLAGS, "trace", "profile")
    )


async def run(settings: DemoSettings) -> int:
    """Run the demonstration that the settings name; return 1 if tokens differ where they must be equal, else 0."""
    from specdec.inference.cli.demo import failover, speed
    from specdec.inference.observe.host_load import busy_at_start
    from specdec.inference.serving.processes import Start

    if busy := await busy_at_start(usable_core_ids()):
        speed.console.print(f"{busy} All takes longer now, and figures of speed mean little.")
    start = Start(settings.start_timeout_s, speed.console.print)
    return await (speed.run(start) if settings.scene == "speed" else failover.run(start))
