"""Plans of comparisons, searches and studies from flags; errors name value, limit and what to use instead."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.comparison.plan.backend import BackendConfig, ServerPlan, server_flags
from specdec.comparison.plan.config import (
    ALONE,
    LOOKUP,
    OPEN_LOOP_BATCH,
    ClientSite,
    ComparisonConfig,
    Contender,
    NetworkConfig,
    PromptSet,
    Topology,
    WorkloadConfig,
)
from specdec.comparison.plan.datasets import Conversation, read_dataset
from specdec.comparison.plan.endpoint import Endpoint, endpoint_of
from specdec.comparison.plan.flags import parse_config
from specdec.comparison.plan.grid import walk
from specdec.comparison.plan.lengths import Characters, Tokens, draw_lengths, prompts_of_lengths
from specdec.comparison.run.load import require_clients
from specdec.comparison.run.measurement import _warm_up
from specdec.comparison.study.flags import AS_JSON, StudyConfig, parse_study
from specdec.comparison.study.laboratory import comparison_of
from specdec.comparison.study.space import Group
from specdec.inference.config import BUNDLED_TARGET, DialSecurity
from specdec.inference.errors import ConfigError
from specdec.inference.request import GrammarKind, Schedule
from tests.support.samples import config, model_directory

PROMPTS = (PromptSet("kind", ("text",)),)
AT_A = "--endpoint a=grpc://localhost:1"
NEURON = "--backend neuron --topologies target,fused"
SEARCH = "--capacity 32 --slo itl:50ms,ttft:1s"
STUDY = "study --topologies target,fused --concurrency 1 --gamma 4,8"


def parsed(command: str) -> ComparisonConfig | StudyConfig:
    words = shlex.split(command)
    return parse_study(words[1:]) if words[0] == "study" else parse_config(words)


REFUSED = {
    "--cores_per_machine 2": "cores_per_machine 2: 2 machines need 4 cores, this process may use 2",
    "--cores_per_machine=-1": "cores_per_machine -1 is below 0",
    "--gamma 0": "gamma 0 is outside 1..64",
    "--gamma 65": "gamma 65 is outside 1..64",
    "--gamma 4,4": "gamma 4 is given 2 times",
    "--branches 17": "branches 17 is outside 0..16",
    "--draft_models nowhere": "draft model nowhere: no config.json there",
    "--target_model nowhere --draft_models ngram": "target model nowhere: no config.json there",
    "--num_runs 0": "num_runs 0 is below 1",
    "--num-prompts 0": "num_prompts 0 is below 1",
    "--max_new_tokens 1": "max_new_tokens 1 is below 2",
    "--temperature=-1": "temperature -1.0 is outside 0..100",
    f"--seed {2**64}": f"seed {2**64} is outside 0..{2**64 - 1}",
    "--concurrency 0": "concurrency 0 is outside 1..4096",
    "--concurrency ,": "no concurrency is given",
    "--deadline_s 0": "deadline_s 0.0 is not above 0",
    "--request_rate 0": "request_rate 0.0 is outside (0, 10000]",
    "--request_rate 2,2": "request_rate 2.0 is given 2 times",
    "--num_arrivals 0": "num_arrivals 0 is outside 1..100000",
    "--warm_up 0": "warm_up 0 is below 1",
    "--near-tie 11": "near_tie 11.0 is outside 0..10",
    "--near_tie 0.25 --temperature 0.8": "near_tie 0.25: at temperature 0.8 tokens part by noise too",
    "--rtt_ms=-1": "rtt_ms -1.0 is outside 0..10000",
    "--rtt_ms 5,5": "rtt_ms 5.0 is given 2 times",
    "--jitter_ms=-0.5": "jitter_ms -0.5 is outside 0..10000",
    "--bandwidth_mbps 0": "bandwidth_mbps 0.0 is not above 0",
    "--dataset random": "dataset random needs --input_tokens",
    "--dataset nowhere.json": "dataset nowhere.json cannot be read",
    "--input_tokens 0": "mean 0 is outside 1..1000000",
    "--input_tokens 10,11": "stddev 11 is outside 0..10",
    **{f"--slo {limits}": "NAME:NUMBERms" for limits in ("ttft:200", "latency:2ms", "itl:5ms,itl:6ms", "ttft=5ms")},
    # Backends.
    f"{NEURON} --gamma 3,5": "gamma 3, 5: speculation_method fused is compiled for one",
    f"{NEURON} --device_sampling --temperature 0.8": "temperature 0.8: speculation_method fused samples on the device",
    f"{NEURON} --device_sampling --speculation_method eagle --temperature 0.8": "speculation_method eagle samples on",
    f"{NEURON},distributed --device_sampling": "device_sampling is for topologies target and fused",
    f"{NEURON} --draft_dtype int8": "draft_dtype int8 is for a draft on the CPU",
    f"{NEURON} --emulate draft:3ms": "emulate draft:3ms: backend neuron has a device",
    f"{NEURON} --tp_degree 0": "tp_degree 0 is below 1",
    "--compile never": "compile never needs backend neuron, not auto",
    "--device_sampling": "device_sampling needs backend neuron, not auto",
    "--backend torch --speculation_method eagle": "eagle needs backend neuron, not torch",
    "--engine vllm --draft_models ngram": "engine vllm has no draft ngram of its own",
    "--engine vllm --topologies target --emulate target:25ms": "--emulate is not for --engine vllm",
    "--engine vllm --topologies target --dtype float32": "after --, vLLM has --dtype",
    "-- --seed 1": "--engine vllm takes flags of vLLM there",
    "--neuron_config {}": "neuron_config needs backend neuron, not auto",
    # Endpoints.
    f"{AT_A} --rtt_ms 0,5": "rtt_ms 5: the network to an endpoint is what it is",
    f"{AT_A} --emulate target:25ms": "emulate target:25ms: passes of endpoints are their own",
    f"{AT_A} --endpoint a=grpc://localhost:2": "name a is given 2 times",
    "--endpoint target=grpc://localhost:2 --topologies target --rtt_ms 0": "name target is given 2 times",
    "--endpoint grpc://host:1": "NAME=URL is expected",
    "--endpoint 'a b=grpc://host:1'": "endpoint a b: a name has letters",
    "--endpoint a=https://user:geheim@host/v1": "a token belongs into a file",
    "--endpoint a=grpc://host": "grpc://host is not grpc://HOST:PORT",
    "--endpoint a=grpc://host:1/v1": "is not grpc://HOST:PORT",
    "--endpoint a=ftp://host:1/v1": "'ftp://host:1/v1' is none of grpc://HOST:PORT and http(s)",
    "--endpoint a=http://host:8000": "has no path; OpenAI's API is at .../v1",
    "--endpoint a=http://host:99999/v1": "Port out of range",
    "--endpoint a=http://host:1/v1,tls=x": "endpoint a: 'tls' is none of tls_ca",
    "--endpoint a=http://host:1/v1,token_file=x": "the token, prompts and answers would go to host in plain text",
    "--endpoint a=grpc://host:1": "prompts and answers would go to host in plain text",
    "--endpoint a=grpc://host:1,tls_server_name=x": "--tls_server_name without --tls_ca",
    # Searches for capacities.
    "--capacity 8": "slo: --capacity needs",
    "--capacity 8 --slo ttft:1s": "slo: --capacity needs",
    f"{SEARCH} --topologies fused": "name target",
    f"{SEARCH} --concurrency 4": "concurrency: --capacity searches",
    f"{SEARCH} --request_rate 4": "request_rate: --capacity",
    f"{SEARCH} --workers 0": "workers 0 is outside 1..64",
    "--workers 1,2": "workers: several numbers need --capacity",
    # Studies. They took all flags of the comparison: an endpoint that was faster ended one with a traceback.
    f"{STUDY} --topologies fused": "a study needs the target alone",
    f"{STUDY} --max_new_tokens 32,1": "max_new_tokens 1 is below 2",
    f"{STUDY} --temperature 0,101": "temperature 101.0 is outside 0..100",
    f"{STUDY} --max_new_tokens ,": "max_new_tokens 0 is below 2",
    f"{STUDY} --json_schema nowhere.json": "grammar file nowhere.json cannot be read",
    f"{STUDY} {AT_A} --rtt_ms 0": "endpoint: for a comparison, not for a study",
    f"{STUDY} --request_rate 2 --llmperf": "request_rate, llmperf: for a comparison",
    # The bundled draft is not taken for another target.
    **{
        f"{command} {flags}": "--topologies target"
        for command in ("--rtt_ms 0", "study")
        for flags in ("--target_model mine", "--draft_models ngram,none")
    },
}


@pytest.mark.parametrize("command", REFUSED)
def test_refusals_name_value_and_limit(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ConfigError) as error:
        parsed(command)
    assert REFUSED[command] in str(error.value)
    assert "geheim" not in str(error.value), "the secret of a URL"


MISSPELT = {
    "--topologies target,mesh": "topology mesh is none of target, fused, distributed",
    "--gamma four": "invalid list of int value: 'four'",
    "--nonsense": "unrecognized arguments: --nonsense",
    **{
        f"study {flags}": flags.split()[0] for flags in ("--budget 10", "--budget 0m", "--price_per_hour 1,2,3", "--no")
    },
    "--help": "network between edge and target",
}


@pytest.mark.parametrize("command", MISSPELT)
def test_unusable_flags_end_with_a_message(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as error:
        parsed(command)
    captured = capsys.readouterr()
    assert (error.value.code or 0) == (0 if command == "--help" else 2)
    assert MISSPELT[command] in captured.out + captured.err


def test_missing_locust_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error about missing Locust names the command that installs it.

    Regression: the message named a requirements file, which an installation by pip lacks.
    """
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "locust" else object())
    with pytest.raises(ConfigError, match=r"pip install locust gevent$"):
        require_clients(parse_config(["--concurrency", "2", "--topologies", "target"]))


# Contenders, servers and machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "cores", "spare"),
    [
        ({"topologies": (Topology.TARGET, Topology.FUSED), "cores_per_machine": 2}, [(0, 1)], ()),
        ({"usable_cores": (2, 3, 5, 8, 9), "cores_per_machine": 2}, [(2, 3), (5, 8)], (9,)),
        ({"usable_cores": (3, 5), "cores_per_machine": 0}, [(3,), (3,)], (5,)),
    ],
)
def test_machines_share_cores_only_if_asked(
    tmp_path: Path, changes: dict[str, object], cores: list[tuple[int, ...]], spare: tuple[int, ...]
) -> None:
    found = config(tmp_path, **changes)
    assert ([machine.cores for machine in found.machines], found.spare_cores) == (cores, spare)


def test_branches_are_compared_where_the_draft_runs_ahead(tmp_path: Path) -> None:
    """Only topologies whose draft runs ahead are measured with several numbers of branches (guesses for a token).

    In topology pool, each number of branches has a target server of its own.
    """
    found = config(tmp_path, branches=(0, 3), schedules=(Schedule.SYNC, Schedule.ASYNC))
    assert [(it.name, it.branches) for it in found.contenders] == [
        *(("target", None), ("fused", None), ("distributed sync", None)),
        *(("distributed async", 0), ("distributed async", 3), ("pool", 0), ("pool", 3)),
    ]
    assert [(it.role, it.branches, it.pooled) for it in found.servers if it.draft == found.draft_models[0]] == [
        *(("fused_target", None, False), ("draft", 0, False), ("draft", 3, False)),
        *(("target", 0, True), ("draft", 0, True), ("target", 3, True), ("draft", 3, True)),
    ]


def test_a_search_for_capacities_tries_all_ways() -> None:
    found = parse_config(f"{SEARCH} --topologies target,fused,pool --workers 1,2,4".split())
    assert [(it.name, it.draft == LOOKUP) for it in found.contenders] == [
        *(("target", False), ("target", True), ("fused", False)),
        *(("pool", False), ("pool of 2", False), ("pool of 4", False)),
    ]
    assert sum(server.role == "draft" for server in found.servers) == 7
    assert len(set(found.servers)) == len(found.servers)
    (prompts,) = found.workload.prompt_sets
    assert len(prompts.prompts) == 6


def test_one_at_a_time_starts_in_sequence(tmp_path: Path) -> None:
    """With --one_at_a_time, few servers run at once, and each topology, draft and gamma is still measured once."""
    found = config(
        tmp_path,
        draft_models=(str(model_directory(tmp_path, "draft")), "ngram"),
        gammas=(1, 3),
        endpoints=(Endpoint("a", "grpc://localhost:1"), Endpoint("b", "http://localhost/v1")),
        network=NetworkConfig((0.0,)),
        one_at_a_time=True,
    )
    assert len(found.contenders) == 1 + 3 * 2 * 2 + 2
    pairs = [["target", "draft"]] * 2
    roles = [list(dict.fromkeys(server.role for server in part.servers)) for part in found.parts]
    assert roles == [["target"], *[["fused_target"]] * 2, *pairs, *pairs, []]
    measured = [contender for part in found.parts for contender in part.contenders]
    assert sorted(measured, key=str) == sorted(found.contenders, key=str)


def test_locust_sends_closed_loops_of_texts(tmp_path: Path) -> None:
    """Locust is used only for a fixed number of clients (a closed loop) that send texts to this project's own servers.

    Regression: with --one_at_a_time an open loop, which sends at a rate, had Locust too, and it sent to no endpoint.
    """
    several = WorkloadConfig(PROMPTS, concurrencies=(1, 4))
    beside: dict[str, object] = {"workload": several, "endpoints": (Endpoint("a", "grpc://localhost:1"),)}
    chats = replace(several, prompt_sets=(PromptSet("chats", (Conversation(("hello",)),)),))
    cases: list[tuple[bool, dict[str, object]]] = [
        (True, {"workload": several}),
        (False, beside),
        (False, {**beside, "one_at_a_time": True}),
        (False, {"workload": chats}),
        (False, {"workload": replace(several, cell_s=20.0)}),
        (False, {"workload": WorkloadConfig(PROMPTS, request_rates=(4.0,))}),
    ]
    for expected, changes in cases:
        parts = config(tmp_path, network=NetworkConfig((0.0,)), **changes).parts
        assert any(part.uses_locust for part in parts) is expected


def test_an_open_loop_warms_up_at_full_width(tmp_path: Path) -> None:
    """The warm-up of an open loop (a fixed rate of requests) has passes over as many requests as the measurement.

    Regression: the first topology that was measured ran its first passes over many requests in the measurement.
    """
    workload = WorkloadConfig(PROMPTS, concurrencies=(1, 4), request_rates=(8.0, 2.0))
    assert workload.loads == ((1, None), (4, None), (0, 2.0), (0, 8.0))
    loads = {cell.concurrency for cell in _warm_up(config(tmp_path, workload=replace(workload, concurrencies=(1,))))}
    assert loads == {1, OPEN_LOOP_BATCH}


def test_every_contender_is_the_first_of_each_condition_equally_often(tmp_path: Path) -> None:
    """Each topology, draft and gamma is measured first equally often at each round trip time and kind of prompt.

    Regression: with as many round trip times as servers to compare, each round trip time had the same server first in
    all runs.
    """
    plan = config(tmp_path)
    num = len(plan.contenders)
    network, workload = NetworkConfig(tuple(map(float, range(num)))), replace(plan.workload, num_runs=num)
    first = [cell for _, cell in walk(replace(plan, network=network, workload=workload))][::num]
    kinds = {each.kind for each in workload.prompt_sets}
    for kind, rtt_ms in itertools.product(kinds, network.rtts_ms):
        assert len({it.contender for it in first if (it.kind, it.rtt_ms) == (kind, rtt_ms)}) == num


# Flags and files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dash", ["-", "_"])
def test_flags_take_both_spellings(tmp_path: Path, dash: str) -> None:
    target, draft = (model_directory(tmp_path, name) for name in ("target", "draft"))
    prompts = tmp_path / "my-kind.txt"
    prompts.write_text("one\n\ntwo\nthree\n")
    flags = f"--prompt-file {prompts} --num-runs 2 --rtt-ms=0,2.5 --jitter-ms 1 --bandwidth-mbps 8 --client-site target"
    models = f"--target-model {target} --draft-models {draft},ngram --gamma 1,3 --topologies target,fused"
    words = f"{flags} {models} --num-prompts 2 --output {tmp_path}".split()
    found = parse_config([f"--{it[2:].replace('-', dash)}" if it.startswith("--") else it for it in words])
    assert found.workload.prompt_sets == (PromptSet("my-kind", ("one", "two")),)
    assert found.network == NetworkConfig((0.0, 2.5), 1.0, 8.0, ClientSite.TARGET)
    assert (found.gammas, found.topologies) == ((1, 3), (Topology.TARGET, Topology.FUSED))
    assert found.draft_models == (str(draft), "ngram")


@settings(max_examples=15)
@given(
    endpoints=st.lists(
        st.sampled_from(["a=grpc://localhost:1", "b=http://localhost:2/v1", "c=https://h/v1,tls_ca=x y"]), unique=True
    ),
    gammas=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
    output=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda text: text.strip()),
    temperature=st.floats(0, 100),
    seed=st.integers(0, 2**64 - 1),
    switches=st.sets(st.sampled_from(["ignore_eos", "equal_weights", "one_at_a_time", "insecure"])),
)
def test_the_written_configuration_asks_the_same_again(
    endpoints: list[str], gammas: list[int], output: str, temperature: float, seed: int, switches: set[str]
) -> None:
    """The config.toml that a run writes gives the same configuration when it is read."""
    flags = [f"--endpoint={endpoint}" for endpoint in ["z=http://localhost/v1", *endpoints]]
    flags += [f"--gamma={','.join(map(str, gammas))}", f"--output={output}", f"--temperature={temperature}"]
    flags += [f"--seed={seed}", *(f"--{name}" for name in switches)]
    first = parse_config(flags)
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(first.asked)
        file.flush()
        assert parse_config(["--config", file.name]) == first


def test_a_target_alone_needs_no_draft(tmp_path: Path) -> None:
    target = model_directory(tmp_path, "target")
    assert parse_config(["--target_model", str(target), "--topologies", "target"]).draft_models == ()


def test_arrays_of_a_file_are_lists_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('gamma = [1, 3]\nendpoint = ["a=grpc://localhost:1"]\ntopologies = ["target"]\nseed = 4\n')
    found = parse_config(["--config", str(file), "--rtt-ms", "0", "--seed", "5"])
    assert (found.gammas, found.topologies, found.workload.seed) == ((1, 3), (Topology.TARGET,), 5)
    assert [contender.label for contender in found.contenders] == ["target", "a"]


@pytest.mark.parametrize(
    ("text", "address", "is_grpc"),
    [
        ("a=grpc://10.0.0.1:50051", "10.0.0.1:50051", True),
        ("vllm-1=http://localhost:8000/v1/", "localhost:8000", False),
        ("b=https://example.org/api/v1", "example.org:443", False),
        ("c=grpc://[::1]:7", "[::1]:7", True),
    ],
)
def test_endpoints_are_parsed_from_name_and_url(text: str, address: str, is_grpc: bool) -> None:
    endpoint = endpoint_of(text, DialSecurity(insecure=True))
    assert (endpoint.address, endpoint.is_grpc, endpoint.url[-1] != "/") == (address, is_grpc, True)


def test_an_endpoint_may_have_its_own_security() -> None:
    common = DialSecurity(ca=Path("ours.pem"), token_file=Path("ours.token"))
    text = "a=grpc://host:1,tls_client_key=k,tls_client_cert=c,tls_ca=theirs.pem"
    found = endpoint_of(text, common).security
    assert found == DialSecurity(Path("theirs.pem"), Path("c"), Path("k"), token_file=Path("ours.token"))
    assert endpoint_of("b=grpc://host:1", common).security == common


# Studies --------------------------------------------------------------------------------------------------------------


def studied(flags: str) -> StudyConfig:
    return parse_study(shlex.split(f"{STUDY} {flags}")[1:])


def test_the_first_of_every_list_is_the_usual_one() -> None:
    found = studied("--rtt-ms 80,0 --max-new-tokens 32,8 --temperature 0.5,0 --budget 90s")
    usual = found.space.usual
    assert (usual.rtt_ms, usual.max_new_tokens, usual.temperature, usual.kind) == (80.0, 32, 0.5, "structured")
    assert found.space.ways == (Contender(Topology.TARGET, LOOKUP, 8), found.comparison.contenders[1])
    assert (found.budget_s, found.prices) == (90.0, None)


def test_a_group_is_a_comparison_with_the_target_alone(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    found = studied(f"--json_schema {tmp_path / 'schema.json'} --max_new_tokens 32,8")
    plain, as_json = found.space.usual, next(it for it in found.space.changed(1) if it.kind.endswith(AS_JSON))
    for place in (plain, as_json):
        comparison = comparison_of(found, Group(place, found.space.ways))
        assert comparison.contenders == (ALONE, *found.space.ways)
        assert [prompt_set.kind for prompt_set in comparison.workload.prompt_sets] == ["structured"]
        assert comparison.network.rtts_ms == (place.rtt_ms,)
        grammar = comparison.workload.grammar
        assert (grammar and grammar.kind) == (GrammarKind.JSON_SCHEMA if place is as_json else None)


def test_a_study_repeats_and_takes_a_comparisons_file(tmp_path: Path) -> None:
    """A study accepts the config.toml of a comparison, and writes one that repeats the study.

    Regression: a study's defaults replaced flags of the file, and a study wrote no file that repeats it.
    """
    first, file = studied("--rtt-ms 80,0 --max-new-tokens 32,8 --budget 90s --price_per_hour 3,1"), tmp_path / "it.toml"
    file.write_text(first.comparison.asked)
    assert parse_study(["--config", str(file)]) == first
    file.write_text('gamma = "3"\nconcurrency = "1"\ntopologies = "target,fused"\nmax_new_tokens = 20')
    found = parse_study(["--config", str(file)])
    assert (found.comparison.gammas, found.space.usual.max_new_tokens) == ((3,), 20)


# Backends -------------------------------------------------------------------------------------------------------------

SERVERS = [
    ServerPlan("target"),
    ServerPlan("fused_target", "small"),
    *(ServerPlan("draft", it) for it in ("a", "ngram")),
]
ON_NEURON = BackendConfig("neuron", tp_degree=4, draft_tp_degree=2, first_core=8, dtype="float32")
COMMON = "--backend neuron --dtype=float32 --compile=auto"
EMULATED = "--emulate target:25ms,draft:3ms"


def flags_of(backend: BackendConfig, gammas: tuple[int, ...] = (3,)) -> list[str]:
    return [" ".join(server_flags(backend, server, SERVERS, gammas)) for server in SERVERS]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [""] * 4),
        (EMULATED, [EMULATED] * 3 + [""]),  # prompt lookup has no passes
        ("--draft_backend onnx --draft_dtype int8", ["", "", "--backend onnx --dtype int8", ""]),
    ],
)
def test_servers_get_the_flags_of_their_backends(flags: str, expected: list[str]) -> None:
    backend = parse_config(flags.split()).backend
    assert flags_of(backend) == expected


def test_every_server_has_neuron_cores_of_its_own() -> None:
    assert flags_of(ON_NEURON) == [
        f"{COMMON} --tp_degree 4 --neuron_cores 8-11 --gamma 3",
        f"{COMMON} --tp_degree 4 --neuron_cores 12-15 --gamma 4 --draft_tp_degree 2",
        f"{COMMON} --tp_degree 2 --neuron_cores 16-17",
        "",
    ]
    assert flags_of(BackendConfig("neuron", "torch", dtype="bfloat16"))[2] == "--backend torch"


def test_vanilla_has_room_for_the_longest_of_several_gammas() -> None:
    target, fused, *_ = flags_of(BackendConfig("neuron", method="vanilla"), (3, 7))
    assert "--gamma 7 --draft_tp_degree 1 --speculation_method vanilla" in fused
    assert "--gamma 7" in target
    flags = "--speculation-method vanilla --gamma 3,5 --temperature 0.8 --draft-models ngram --tp-degree 2"
    found = parse_config(f"{NEURON} {flags}".split())
    assert (found.backend.tp_degree, found.backend.num_draft_cores) == (2, 2)
    assert found.servers == (ServerPlan("target"), ServerPlan("fused_target", "ngram"))
    assert parse_config(["--backend", "neuron", "--topologies", "target", "--gamma", "1,2"]).gammas == (1, 2)


def test_a_baseline_chooses_tokens_where_the_pair_does() -> None:
    """On Neuron, the target alone chooses its tokens on the device if the pair with the draft does.

    Otherwise the pair's speed-up would include the gain of choosing tokens on the device.
    """
    on_device = BackendConfig("neuron", device_sampling=True)
    assert ["--device_sampling" in flags for flags in flags_of(on_device)] == [True, True, False, False]
    assert not any("--device_sampling" in flags for flags in flags_of(ON_NEURON))
    assert parse_config(f"{NEURON} --device_sampling".split()).backend.device_sampling
    assert parse_config(f"{NEURON} --temperature 0.8".split()).backend.keeps_seeds


# Prompts --------------------------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]}
TOOLS = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": []}]}
UNREADABLE = [
    ("a.jsonl", '{"prompt": "x"}\n{"prompt"', "a.jsonl, line 2: not valid JSON"),
    ("a.jsonl", "[1]", "a.jsonl, line 1: a JSON object is expected"),
    ("a.jsonl", '{"prompt": ""}', "a.jsonl, line 1: a text that is not empty is expected"),
    ("a.jsonl", "{}", 'a.jsonl, line 1: a list "messages" is expected'),
    ("a.jsonl", '{"messages": [{"role": "user", "content": 5}]}', "line 1, messages[0]: a text"),
    ("a.jsonl", '{"messages": [{"role": "system", "content": "x"}]}', 'line 1: no message is of "user"'),
    ("a.jsonl", "\n", "a.jsonl has no prompt"),
    ("a.jsonl", '{"prompt": "a\\ud800"}', "a.jsonl, line 1: character 1 is not valid UTF-8"),
    ("a.json", "{}", "a.json: ShareGPT's list of conversations is expected"),
    ("a.json", '[\n{"x": }]', "a.json: not valid JSON (Expecting value: line 2"),
    ("a.json", '[{"conversations": 1}]', 'a.json, conversation 1: a list "conversations" is expected'),
    ("a.json", "[]", "a.json has no prompt"),
    ("a.txt", "\n", "a.txt has no prompt"),
]


def test_files_have_chats_or_prompts(tmp_path: Path) -> None:
    """A file of conversations is accepted if the parts that are sent are valid.

    Regression: a file of conversations was refused for parts that are never sent, such as empty answers.
    """
    share, chats = tmp_path / "share.json", tmp_path / "chats.jsonl"
    turns = [("human", "one"), ("gpt", ""), ("human", "two")], [("gpt", "alone")], [("human", ""), ("gpt", "what?")]
    entries = [{"conversations": [{"from": it, "value": text} for it, text in each]} for each in turns]
    share.write_text(json.dumps(entries))
    assert read_dataset(share) == (Conversation(("one", "two")),)
    chats.write_text(f'{json.dumps(CHAT)}\n\n{{"prompt": "a text"}}\n{json.dumps(TOOLS)}')
    assert read_dataset(chats) == (Conversation(("hello",), "be brief"), "a text", Conversation(("one",)))
    with pytest.raises(ConfigError, match="has conversations, whose lengths are their own"):
        parse_config([*AT_A.split(), "--dataset", str(chats), "--input_tokens", "9"])


@pytest.mark.parametrize(("name", "text", "message"), UNREADABLE)
def test_unreadable_prompts_are_named_with_their_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_dataset(tmp_path / name)
    assert message in str(error.value)


@settings(max_examples=50)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40), max_size=4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    seed=st.integers(0, 2**64 - 1),
)
def test_prompts_have_the_lengths_that_were_drawn(texts: list[str], lengths: list[int], seed: int) -> None:
    prompts = prompts_of_lengths(texts, lengths, seed, Characters())
    assert [len(Characters().cut(prompt)) for prompt in prompts] == lengths
    assert prompts == prompts_of_lengths(texts, lengths, seed, Characters())


def test_a_tokenizer_counts_its_own_tokens() -> None:
    """A prompt that is cut to a number of tokens has no more than these, and on average hardly fewer."""
    pieces, lengths = Tokens(BUNDLED_TARGET), list(range(1, 60))
    for texts in ((), ("It was a dark and stormy night, 1 2 3 4", "caf\u00e9 \u4f60\u597d")):
        found = [len(pieces.cut(prompt)) for prompt in prompts_of_lengths(texts, lengths, 7, pieces)]
        assert all(count <= length for count, length in zip(found, lengths, strict=True))
        assert statistics.fmean(length - count for count, length in zip(found, lengths, strict=True)) < 1.0


def test_lengths_are_distributed_as_asked_and_repeat() -> None:
    lengths = draw_lengths(2000, 5, 200.0, 20.0)
    assert statistics.fmean(lengths) == pytest.approx(200.0, rel=0.02)
    assert statistics.stdev(lengths) == pytest.approx(20.0, rel=0.1)
    assert lengths == draw_lengths(2000, 5, 200.0, 20.0) != draw_lengths(2000, 6, 200.0, 20.0)


def test_flags_make_prompts_of_a_length_without_a_model() -> None:
    flags = f"{AT_A} --dataset random --input_tokens 50 --num_prompts 4".split()
    [found] = parse_config(flags).workload.prompt_sets
    assert found.kind == "random"
    assert [len(prompt) for prompt in found.prompts if isinstance(prompt, str)] == [200] * 4
