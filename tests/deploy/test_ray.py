"""deploy/ray: its parts without Ray, in the ordinary suite; and a cluster that loses a node, in `make ray-test`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from deploy.ray.child import DRAIN_S
from deploy.ray.demo import Answers, Clients, Town, processes_of, town
from deploy.ray.registry import ANSWER_S, BEAT_S, LEASE_S, Leases
from deploy.ray.scaling import by_slots
from inference.cli.roles.registry import settings_of
from inference.config import ROOT, ServerConfig
from tests.deploy.consistency import FORCED_END_S
from tests.test_tutorials import check_role

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
OWN_FLAGS = {
    "targets": ["--role", "target", "--port", "0"],
    "drafts": ["--role", "draft", "--attach", "file:///list"],
    "gateway": ["--role", "gateway", "--target_host", "file:///list"],
}


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def heard(leases: Leases, known: int = 0) -> list[str] | None:
    """What a follower is told at once; None: it waits."""
    try:
        return (await asyncio.wait_for(leases.wait(known), timeout=0.01))[1]
    except TimeoutError:
        return None


async def test_a_target_is_there_as_long_as_its_lease() -> None:
    clock = Clock()
    leases = Leases(clock)
    clock.now += 2 * BEAT_S
    await leases.put("a", "h:1", "n")
    await leases.put("b", "h:2", "n")
    version, addresses = await leases.wait(0)
    assert addresses == ["h:1", "h:2"]
    clock.now += LEASE_S - 0.1
    await leases.put("a", "h:1", "n")
    assert await heard(leases, version) is None, "a lease that is renewed is no news"
    clock.now += 0.2
    assert await heard(leases, version) == ["h:1"]
    await leases.put("a", "h:3", "n")
    assert await heard(leases, version) == ["h:3"]
    await leases.remove("a")
    assert await heard(leases, version) == []


async def test_a_restarted_registry_waits_for_all_leases() -> None:
    """Else its followers would leave whom it hears of last."""
    clock = Clock()
    leases = Leases(clock)
    await leases.put("a", "h:1", "n")
    assert await heard(leases) is None
    await leases.put("b", "h:2", "n")
    clock.now += 2 * BEAT_S
    assert await heard(leases) == ["h:1", "h:2"]


async def test_nobody_waits_for_ever() -> None:
    """A follower that has died would keep one of the actor's places."""
    clock = Clock()
    leases = Leases(clock)
    clock.now += 2 * BEAT_S
    version, _ = await leases.wait(0)
    waiting = asyncio.create_task(leases.wait(version))
    await asyncio.sleep(0)
    clock.now += ANSWER_S
    await leases.put("a", "h:1", "n")
    await leases.remove("a")
    assert (await asyncio.wait_for(waiting, timeout=20))[1] == []


@dataclass
class Context:
    """What Serve tells."""

    aggregated_metrics: dict[str, dict[str, float]] | None
    current_num_replicas: int = 2
    policy_state: dict[str, Any] = field(default_factory=lambda: {"kept": 1})


@pytest.mark.parametrize(("busy", "wanted"), [([0, 0], 1), ([6, 0], 1), ([7, 0], 2), ([20, 4], 4), ([64, 0], 10)])
def test_as_many_targets_as_their_sessions_fill(busy: list[float], wanted: int) -> None:
    metrics = {"busy": dict(zip("ab", busy, strict=True)), "slots": {"a": 8.0, "b": 8.0}}
    assert by_slots(Context(metrics)) == (wanted, {"kept": 1})


@pytest.mark.parametrize("metrics", [None, {}, {"busy": {"a": 0.0}, "slots": {"a": 0.0}}])
def test_nobody_is_sent_away_before_anybody_has_reported(metrics: dict[str, dict[str, float]] | None) -> None:
    assert by_slots(Context(metrics))[0] == 2


@pytest.mark.parametrize("application", CONFIG["applications"], ids=lambda each: each["name"])
def test_every_command_line_is_one(application: dict[str, Any]) -> None:
    """Of hosts beyond loopback, too, where a server wants to be told who may read along."""
    args = application["args"]
    words = [*OWN_FLAGS[application["name"]], *args["flags"], "--host", args.get("host", "10.0.0.1")]
    check_role(words)
    server: ServerConfig = settings_of(words[1], words[2:]).server
    assert server.grace_s + FORCED_END_S < DRAIN_S
    if words[1] == "target":
        assert server.ends_by_call, "and others than this machine attach: worker is a role of the auth file"
    else:
        assert "--token_file" in words


@pytest.fixture(scope="module")
def place() -> Iterator[Town]:
    """A cluster of which nothing is left behind."""
    with town() as place:
        yield place
    assert processes_of(place) == []


@pytest.mark.ray
def test_serve_takes_the_configuration(place: Town) -> None:
    from ray.serve.schema import ServeDeploySchema

    from deploy.ray import replicas

    for application in ServeDeploySchema.model_validate(CONFIG).applications:
        kind = {"targets": "Target", "drafts": "Draft", "gateway": "Gateway"}[application.name]
        assert [deployment.name for deployment in application.deployments] == [kind]
        assert getattr(replicas, application.import_path.rpartition(":")[2])(application.args) is not None


@pytest.mark.ray
def test_a_node_is_killed_and_no_answer_is_lost(place: Town) -> None:
    """Two targets and a spare node; the clients of the dead one get the same tokens from the other."""
    place.serve(num_replicas=2)

    async def lose_one() -> Answers:
        clients = Clients(place.port)
        await clients.learn()
        dead, _ = await place.targets()

        async def lose() -> None:
            await place.kill(dead)
            await place.until(lambda targets: len(targets) == 2 and dead not in targets)

        return await clients.during(6, lose)

    answers = asyncio.run(lose_one())
    assert (answers.num_failed, answers.num_other) == (0, 0)
    assert answers.num_done >= 6
