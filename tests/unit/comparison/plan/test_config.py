"""Flags and limits: what is refused, and that the message names value and limit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comparison.plan.backend import BackendConfig
from comparison.plan.config import (
    OPEN_LOOP_BATCH,
    ClientSite,
    Contender,
    NetworkConfig,
    PromptSet,
    Topology,
    WorkloadConfig,
)
from comparison.plan.datasets import Conversation
from comparison.plan.endpoint import Endpoint
from comparison.plan.flags import parse_config
from comparison.run.load import require_clients
from comparison.run.measurement import _warm_up
from comparison.study.flags import parse_study
from inference.config import Emulation, PassTime
from inference.errors import ConfigError
from inference.request import Schedule
from tests.conftest import ModelDirectories
from tests.support.samples import config, model_directory

PROMPTS = (PromptSet("kind", ("text",)),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cores_per_machine": 2}, "cores_per_machine 2: 2 machines need 4 cores, this process may use 2"),
        ({"cores_per_machine": -1}, "cores_per_machine -1 is below 0"),
        ({"usable_cores": (3,)}, "2 machines need 2 cores, this process may use 1"),
        ({"gammas": (0,)}, "gamma 0 is outside 1..64"),
        ({"gammas": (65,)}, "gamma 65 is outside 1..64"),
        ({"gammas": (4, 4)}, "gamma 4 is given 2 times"),
        ({"topologies": ()}, "no topology is given"),
        ({"draft_models": ("nowhere",)}, "draft model nowhere: no config.json there"),
        ({"target_model": Path("nowhere")}, "target model nowhere: no config.json there"),
    ],
)
def test_impossible_comparisons_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_runs": 0}, "num_runs 0 is below 1"),
        ({"max_new_tokens": 1}, "max_new_tokens 1 is below 2"),
        ({"temperature": -1.0}, "temperature -1.0 is outside 0..100"),
        ({"seed": 2**64}, f"seed {2**64} is outside 0..{2**64 - 1}"),
        ({"concurrencies": (0,)}, "concurrency 0 is outside 1..4096"),
        ({"concurrencies": ()}, "no concurrency is given"),
        ({"deadline_s": 0.0}, "deadline_s 0.0 is not above 0"),
        ({"request_rates": (2.0, 2.0)}, "request_rate 2.0 is given 2 times"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        WorkloadConfig(PROMPTS, **changes)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rtts_ms": (-1.0,)}, "rtt_ms -1.0 is outside 0..10000"),
        ({"rtts_ms": (5.0, 5.0)}, "rtt_ms 5.0 is given 2 times"),
        ({"jitter_ms": -0.5}, "jitter_ms -0.5 is outside 0..10000"),
        ({"bandwidth_mbps": 0.0}, "bandwidth_mbps 0.0 is not above 0"),
    ],
)
def test_impossible_networks_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        NetworkConfig(**changes)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_one_machine_is_enough_without_distributed(tmp_path: Path) -> None:
    found = config(tmp_path, topologies=(Topology.TARGET, Topology.FUSED), cores_per_machine=2)
    assert [machine.cores for machine in found.machines] == [(0, 1)]


def test_machines_do_not_share_cores(tmp_path: Path) -> None:
    found = config(tmp_path, usable_cores=(2, 3, 5, 8, 9), cores_per_machine=2)
    assert [machine.cores for machine in found.machines] == [(2, 3), (5, 8)]
    assert found.spare_cores == (9,)


def test_contenders_are_the_target_and_every_way_to_draft(tmp_path: Path) -> None:
    drafts = (str(model_directory(tmp_path, "draft")), "ngram")
    found = config(tmp_path, draft_models=drafts, gammas=(1, 3)).contenders
    assert found[0] == Contender(Topology.TARGET)
    assert len(found) == 1 + 3 * 2 * 2


def test_branches_are_compared_where_the_draft_runs_ahead(tmp_path: Path) -> None:
    """Each number of them has its own worker, and a target of its own in the pool; rounds have none."""
    found = config(tmp_path, branches=(0, 3), schedules=(Schedule.SYNC, Schedule.ASYNC))
    assert [(it.name, it.branches) for it in found.contenders] == [
        ("target", None),
        ("fused", None),
        ("distributed sync", None),
        ("distributed async", 0),
        ("distributed async", 3),
        ("pool", 0),
        ("pool", 3),
    ]
    draft = found.draft_models[0]
    assert [(it.role, it.branches, it.pooled) for it in found.servers if it.draft == draft] == [
        ("fused_target", None, False),
        ("draft", 0, False),
        ("draft", 3, False),
        ("target", 0, True),
        ("draft", 0, True),
        ("target", 3, True),
        ("draft", 3, True),
    ]
    with pytest.raises(ConfigError, match=r"branches 17 is outside 0\.\.16"):
        config(tmp_path, branches=(17,))


@pytest.mark.parametrize("dash", ["-", "_"])
def test_flags_take_both_spellings(tmp_path: Path, dash: str) -> None:
    target, draft = (model_directory(tmp_path, name) for name in ("target", "draft"))
    prompts = tmp_path / "my-kind.txt"
    prompts.write_text("one\n\ntwo\nthree\n")
    flags = f"--prompt-file {prompts} --num-runs 2 --rtt-ms=0,2.5 --jitter-ms 1 --bandwidth-mbps 8 --client-site target"
    models = f"--target-model {target} --draft-models {draft},ngram --gamma 1,3 --topologies target,fused"
    found = parse_config(_spelled(f"{flags} {models} --num-prompts 2 --output {tmp_path}", dash))
    assert found.workload.prompt_sets == (PromptSet("my-kind", ("one", "two")),)
    assert found.network == NetworkConfig((0.0, 2.5), 1.0, 8.0, ClientSite.TARGET)
    assert (found.gammas, found.topologies) == ((1, 3), (Topology.TARGET, Topology.FUSED))
    assert found.draft_models == (str(draft), "ngram")


def _spelled(flags: str, dash: str) -> list[str]:
    words = flags.split()
    return [f"--{word[2:].replace('-', dash)}" if word.startswith("--") else word for word in words]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topologies", "target,mesh"], "topology mesh is none of target, fused, distributed"),
        (["--gamma", "four"], "invalid list of int value: 'four'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_unusable_flags_end_with_a_message(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as error:
        parse_config(flags)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_no_prompts_of_a_file_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_prompts 0 is below 1"):
        parse_config(["--num-prompts", "0"])


def test_help_is_grouped_with_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    text = capsys.readouterr().out
    for words in ("what is compared:", "workload:", "network between edge and target", "milliseconds", "(0,10,50)"):
        assert words in text


def test_missing_locust_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message named a file of requirements, which an installation by pip has not."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "locust" else object())
    with pytest.raises(ConfigError, match=r"pip install locust gevent$"):
        require_clients(parse_config(["--concurrency", "2", "--topologies", "target"]))


@settings(max_examples=30)
@given(
    endpoints=st.lists(
        st.sampled_from(["a=grpc://localhost:1", "b=http://localhost:2/v1", "c=https://h/v1,tls_ca=x y"]), unique=True
    ),
    gammas=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
    output=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda text: text.strip()),
    temperature=st.floats(0, 100),
    seed=st.integers(0, 2**64 - 1),
    switches=st.sets(st.sampled_from(["ignore_eos", "equal_weights", "one_at_a_time", "insecure", "device_sampling"])),
)
def test_the_written_configuration_asks_the_same_again(
    endpoints: list[str], gammas: list[int], output: str, temperature: float, seed: int, switches: set[str]
) -> None:
    """A run's config.toml with --config is the run's flags, whatever they were."""
    flags = [f"--endpoint={endpoint}" for endpoint in ["z=http://localhost/v1", *endpoints]]
    flags += [f"--gamma={','.join(map(str, gammas))}", f"--output={output}", f"--temperature={temperature}"]
    flags += [f"--seed={seed}", *(f"--{name}" for name in switches - {"device_sampling"})]
    first = parse_config(flags)
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(first.asked)
        file.flush()
        assert parse_config(["--config", file.name]) == first


@pytest.mark.parametrize("parse", [parse_config, parse_study])
@pytest.mark.parametrize("flags", [["--target_model", "mine"], ["--draft_models", "ngram,none"]])
def test_no_draft_is_taken_for_another_target(parse: Callable[[list[str]], object], flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--draft_models DIR.*--draft_models ngram.*--topologies target"):
        parse(flags)


def test_a_target_alone_needs_no_draft(models: ModelDirectories) -> None:
    assert parse_config(["--target_model", str(models.target), "--topologies", "target"]).draft_models == ()


def test_arrays_of_a_file_are_lists_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('gamma = [1, 3]\nendpoint = ["a=grpc://localhost:1"]\ntopologies = ["target"]\nseed = 4\n')
    found = parse_config(["--config", str(file), "--rtt-ms", "0", "--seed", "5"])
    assert (found.gammas, found.topologies, found.workload.seed) == ((1, 3), (Topology.TARGET,), 5)
    assert [contender.label for contender in found.contenders] == ["target", "a"]


def test_one_at_a_time_starts_in_sequence(tmp_path: Path) -> None:
    """Together they are what is measured together: no contender is lost, and none comes twice."""
    drafts = (str(model_directory(tmp_path, "draft")), "ngram")
    endpoints = (Endpoint("a", "grpc://localhost:1"), Endpoint("b", "http://localhost/v1"))
    network = NetworkConfig((0.0,))
    found = config(tmp_path, draft_models=drafts, endpoints=endpoints, network=network, one_at_a_time=True)
    assert [[server.role for server in part.servers] for part in found.parts] == [
        ["target"],
        *[["fused_target"]] * 2,
        *[["target", "draft"]] * 2,
        *[["target", "draft"]] * 2,
        [],
    ]
    measured = [contender for part in found.parts for contender in part.contenders]
    assert sorted(measured, key=str) == sorted(found.contenders, key=str)


def test_locust_is_for_what_it_can_ask_of_everybody(tmp_path: Path) -> None:
    """An open loop has room for several requests and one client: it once asked for Locust. With --one_at_a_time beside
    endpoints, what was started was asked by Locust, installed or not, and the endpoints were not."""

    def uses_locust(workload: WorkloadConfig, **changes: object) -> bool:
        return config(tmp_path, workload=workload, network=NetworkConfig((0.0,)), **changes).uses_locust

    several = WorkloadConfig(PROMPTS, concurrencies=(1, 4))
    assert uses_locust(several)
    assert not uses_locust(several, endpoints=(Endpoint("a", "grpc://localhost:1"),))
    beside = {
        "endpoints": (Endpoint("a", "grpc://localhost:1"),),
        "network": NetworkConfig((0.0,)),
        "one_at_a_time": True,
    }
    assert not any(part.uses_locust for part in config(tmp_path, workload=several, **beside).parts)
    assert not uses_locust(replace(several, prompt_sets=(PromptSet("chats", (Conversation(("hello",)),)),)))
    assert not uses_locust(WorkloadConfig(PROMPTS, request_rates=(4.0,)))


def test_passes_of_endpoints_are_not_emulated(tmp_path: Path) -> None:
    """--emulate was taken, did nothing, and had real measurements labelled EMULATED."""
    there = {"topologies": (), "endpoints": (Endpoint("a", "grpc://127.0.0.1:1"),), "network": NetworkConfig((0.0,))}
    with pytest.raises(ConfigError, match="emulate target:25ms: passes of endpoints are their own"):
        config(tmp_path, **there, backend=BackendConfig(emulation=Emulation(PassTime(0.025))))


def test_an_open_loop_warms_up_at_full_width(tmp_path: Path) -> None:
    """Its passes over several requests were first seen by whoever was measured first."""
    workload = WorkloadConfig(PROMPTS, request_rates=(2.0,))
    loads = {cell.concurrency for cell in _warm_up(config(tmp_path, workload=workload))}
    assert loads == {1, OPEN_LOOP_BATCH}
