"""Tests of deploy/ray, without Ray; `make ray-test` adds a Ray cluster that loses a node."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from deploy.ray.child import DRAIN_S, Child
from deploy.ray.demo import PATIENCE_S, Answers, Clients, Town, processes_of, town
from deploy.ray.registry import ANSWER_S, BEAT_S, LEASE_S, Leases, registry
from deploy.ray.scaling import by_slots
from specdec.inference.cli.roles.registry import settings_of
from specdec.inference.config import ROOT, ServerConfig
from tests.conftest import ModelDirectories
from tests.deploy.consistency import FORCED_END_S
from tests.test_tutorials import check_role

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
OWN_FLAGS = {
    "targets": ["--role", "target", "--port", "0"],
    "drafts": ["--role", "draft", "--attach", "file:///list"],
    "gateways": ["--role", "gateway", "--target_host", "file:///list"],
}


class Clock:
    """A clock whose time a test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def let_pass(clock: Clock, leases: Leases, seconds: float) -> None:
    """Advance the clock by `seconds` in ten steps; after each, let the registry of targets drop expired leases."""
    for _ in range(10):
        clock.now += seconds / 10
        await leases.leases()


async def heard(leases: Leases, known: int = 0) -> list[str] | None:
    """Ask the registry for the targets' addresses, as a follower (draft worker or gateway) does.

    `known` is the version of the follower's list. Return the new list; None if the registry lets the follower wait.
    """
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
    await let_pass(clock, leases, LEASE_S - 0.1)
    await leases.put("a", "h:1", "n")
    assert await heard(leases, version) is None, "a lease that is renewed is no news"
    clock.now += 0.2
    assert await heard(leases, version) == ["h:1"]
    await leases.put("a", "h:3", "n")
    assert await heard(leases, version) == ["h:3"]
    await leases.remove("a")
    assert await heard(leases, version) == []


async def test_a_restarted_registry_waits_for_all_leases() -> None:
    """A restarted registry of targets gives out no list until every target had time to renew its lease.

    With an earlier list, gateways and draft workers would leave the targets that renew last.
    """
    clock = Clock()
    leases = Leases(clock)
    await leases.put("a", "h:1", "n")
    assert await heard(leases) is None
    await leases.put("b", "h:2", "n")
    clock.now += 2 * BEAT_S
    assert await heard(leases) == ["h:1", "h:2"]


async def test_a_registry_that_hung_names_no_target_before_all_could_renew() -> None:
    """A registry of targets that hung gives out no list until every target had time to renew its lease.

    Regression: after a hung registry all leases had expired, and its next list had only one target.
    """
    clock = Clock()
    leases = Leases(clock)
    await leases.put("a", "h:1", "n")
    await leases.put("b", "h:2", "n")
    await let_pass(clock, leases, 2 * BEAT_S)
    version, _ = await leases.wait(0)
    waiting = asyncio.create_task(leases.wait(version))
    await asyncio.sleep(0)
    clock.now += 100
    await leases.put("a", "h:1", "n")
    assert await heard(leases, version) is None
    await leases.put("b", "h:2", "n")
    clock.now += 2 * BEAT_S
    assert set((await asyncio.wait_for(waiting, 60))[1]) == {"h:1", "h:2"}


async def test_a_registrys_waits_end_without_a_change() -> None:
    """A call that waits for a change of the list of targets ends after a time, with the same list.

    Otherwise a caller that died would occupy one of the actor's concurrent calls for ever.
    """
    clock = Clock()
    leases = Leases(clock)
    clock.now += 2 * BEAT_S
    version, _ = await leases.wait(0)
    waiting = asyncio.create_task(leases.wait(version))
    await asyncio.sleep(0)
    await let_pass(clock, leases, ANSWER_S)
    await leases.put("a", "h:1", "n")
    await leases.remove("a")
    assert (await asyncio.wait_for(waiting, 60))[1] == []


@dataclass
class Context:
    """Stand-in for the context that Ray Serve passes to an autoscaling policy.

    `aggregated_metrics` has figures by their name and then by replica; None before there are any.
    """

    aggregated_metrics: dict[str, dict[str, float]] | None
    current_num_replicas: int = 2
    policy_state: dict[str, Any] = field(default_factory=lambda: {"kept": 1})


@pytest.mark.parametrize(("busy", "wanted"), [([0, 0], 1), ([6, 0], 1), ([7, 0], 2), ([20, 4], 4), ([64, 0], 10)])
def test_as_many_targets_as_their_sessions_fill(busy: list[float], wanted: int) -> None:
    metrics = {"busy": dict(zip("ab", busy, strict=True)), "slots": {"a": 8.0, "b": 8.0}}
    assert by_slots(Context(metrics)) == (wanted, {"kept": 1})


@pytest.mark.parametrize("metrics", [None, {}, {"busy": {"a": 0.0}, "slots": {"a": 0.0}}])
def test_requests_wait_until_a_target_has_reported(metrics: dict[str, dict[str, float]] | None) -> None:
    assert by_slots(Context(metrics))[0] == 2


@pytest.mark.parametrize("application", CONFIG["applications"], ids=lambda each: each["name"])
def test_every_command_line_is_one(application: dict[str, Any]) -> None:
    """Every command line in the application's configuration parses; drafts and gateways also name an access token."""
    args = application["args"]
    words = [*OWN_FLAGS[application["name"]], "--probe_port=0", *args["flags"], "--host", args.get("host", "10.0.0.1")]
    check_role(words)
    server: ServerConfig = settings_of(words[1], words[2:]).server
    assert server.grace_s + FORCED_END_S < DRAIN_S
    if words[1] == "target":
        assert server.ends_by_call, "and others than this machine attach: worker is a role of the auth file"
    else:
        assert "--token_file" in words


async def test_a_child_that_hangs_is_not_alive(models: ModelDirectories) -> None:
    """A server that was stopped by SIGSTOP does not count as alive for its Ray supervisor.

    The check uses the port for probes, since gateways and pool workers have no gRPC port.
    """
    target = ("--model", str(models.target), "--host", "127.0.0.1", "--port", "0", "--threads", "1")
    child = await Child.start("target", target)
    try:
        assert await child.is_alive()
        os.kill(child.pid, signal.SIGSTOP)
        assert not await child.is_alive()
        child.kill()
        assert await child.ended() == -signal.SIGKILL
        assert not await child.is_alive()
    finally:
        child.kill()
        await child.drain()


@pytest.fixture(scope="module")
def place() -> Iterator[Town]:
    """Start a Ray cluster of three nodes, with two targets and two gateways; check that no process outlives it."""
    with town() as place:
        place.serve(num_replicas=2)
        yield place
    assert processes_of(place) == {}


def pids(place: Town, word: str) -> set[int]:
    """Return the ids of the cluster's processes with `word` in their command lines."""
    return {pid for pid, words in processes_of(place).items() if word in words}


async def replaced(place: Town, word: str, pid: int) -> None:
    """Wait until process `pid` has ended, and another process has taken its place.

    That is so once as many processes have `word` in their command lines as when this function was called.
    """
    async with asyncio.timeout(PATIENCE_S):
        num_before = len(pids(place, word))
        while pid in (now := pids(place, word)) or len(now) < num_before:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.5)


def during(place: Town, what: Callable[[], Awaitable[Any]]) -> Answers:
    """Run `what` while six clients send requests; return counts of their answers; none may be refused or wrong."""

    async def all_of_it() -> Answers:
        clients = Clients(place.gateways)
        await clients.learn()
        return await clients.during(6, what)

    answers = asyncio.run(all_of_it())
    print(f"{answers.num_done} answers, {answers.num_again} asked again, longest pause {answers.longest_gap:.1f} s")
    assert (answers.num_failed, answers.num_other) == (0, 0)
    assert answers.num_done >= 6
    return answers


@pytest.mark.ray
def test_serve_takes_the_configuration(place: Town) -> None:
    from ray.serve.schema import ServeDeploySchema

    from deploy.ray import replicas

    for application in ServeDeploySchema.model_validate(CONFIG).applications:
        kind = {"targets": "Target", "drafts": "Draft", "gateways": "Gateway"}[application.name]
        assert [deployment.name for deployment in application.deployments] == [kind]
        assert getattr(replicas, application.import_path.rpartition(":")[2])(application.args) is not None


@pytest.mark.ray
@pytest.mark.release
def test_a_registry_that_hangs_or_is_gone_ends_no_target(place: Town) -> None:
    """Targets keep running while the registry that lists them hangs, and after it has ended.

    Regression: a target whose lease the registry did not renew counted as hung, and Ray Serve ended all targets.
    """
    import ray

    from deploy.ray.replicas import HUNG_S

    async def stop() -> None:
        (actor,), before = pids(place, "ray::Leases"), await place.targets()
        os.kill(actor, signal.SIGSTOP)
        await asyncio.sleep(2 * HUNG_S)
        os.kill(actor, signal.SIGCONT)
        await place.until(lambda targets: targets == before)
        ray.kill(registry(), no_restart=True)
        await replaced(place, "ray::Leases", actor)
        await place.until(lambda targets: targets == before)

    assert during(place, stop).num_again == 0


@pytest.mark.ray
@pytest.mark.release
@pytest.mark.parametrize("role", ["gateway", "draft"])
def test_a_server_that_hangs_is_replaced(place: Town, role: str) -> None:
    """A gateway or draft worker that hangs is replaced, and no request is refused.

    Regression: it was never replaced, since its supervisor noticed only processes that had ended.
    """
    hung = min(pids(place, f"--role {role}"))

    async def stop() -> None:
        os.kill(hung, signal.SIGSTOP)
        await replaced(place, f"--role {role}", hung)

    during(place, stop)


@pytest.mark.ray
def test_a_node_is_killed_and_no_answer_is_lost(place: Town) -> None:
    """No answer is lost when a node dies with its target and gateway; new ones start on the third node."""

    async def lose() -> None:
        dead = min(await place.targets())
        await place.kill(dead)
        await place.until(lambda targets: len(targets) == 2 and dead not in targets)

    during(place, lose)
