"""What the servers of a comparison are told of their backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from comparison.plan.backend import COMPILE_TIMEOUT_S, START_TIMEOUT_S, BackendConfig, ServerPlan, server_flags
from comparison.plan.flags import parse_config
from inference.errors import ConfigError

SERVERS = [
    ServerPlan("target"),
    ServerPlan("fused_target", "small"),
    ServerPlan("draft", "small"),
    ServerPlan("draft", "ngram"),
]
DEVICE = ["--backend", "neuron", "--device_sampling"]
NEURON = BackendConfig("neuron", tp_degree=4, draft_tp_degree=2, first_core=8, dtype="float32")


def flags_of(backend: BackendConfig, server: ServerPlan, gammas: tuple[int, ...] = (3,)) -> str:
    return " ".join(server_flags(backend, server, SERVERS, gammas))


def test_without_a_backend_nothing_is_said() -> None:
    assert [flags_of(BackendConfig(), server) for server in SERVERS] == [""] * 4
    assert BackendConfig().start_timeout_s == START_TIMEOUT_S


def test_every_server_has_cores_of_its_own() -> None:
    common = "--backend neuron --dtype=float32 --compile=auto"
    assert flags_of(NEURON, SERVERS[0]) == f"{common} --tp_degree 4 --neuron_cores 8-11 --gamma 3"
    fused = f"{common} --tp_degree 4 --neuron_cores 12-15 --gamma 4 --draft_tp_degree 2"
    assert flags_of(NEURON, SERVERS[1]) == fused
    assert flags_of(NEURON, SERVERS[2]) == f"{common} --tp_degree 2 --neuron_cores 16-17"
    assert flags_of(NEURON, SERVERS[3]) == ""
    assert NEURON.start_timeout_s == COMPILE_TIMEOUT_S


def test_a_draft_on_the_cpu_takes_no_neuron_core() -> None:
    mixed = BackendConfig("neuron", "torch", dtype="bfloat16")
    assert flags_of(mixed, SERVERS[2]) == "--backend torch"


def test_a_draft_on_the_cpu_keeps_its_dtype() -> None:
    config = parse_config(["--draft_backend", "onnx", "--draft_dtype", "int8"])
    assert [flags_of(config.backend, server) for server in SERVERS] == ["", "", "--backend onnx --dtype int8", ""]
    with pytest.raises(ConfigError, match="draft_dtype int8 is for a draft on the CPU"):
        parse_config(["--backend", "neuron", "--draft_dtype", "int8"])


def test_vanilla_has_room_for_the_longest_of_several_gammas() -> None:
    vanilla = BackendConfig("neuron", method="vanilla")
    assert "--gamma 7 --draft_tp_degree 1 --speculation_method vanilla" in flags_of(vanilla, SERVERS[1], (3, 7))
    assert "--gamma 7" in flags_of(vanilla, SERVERS[0], (3, 7))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "neuron", "--gamma", "3,5"], "gamma 3, 5: speculation_method fused is compiled for one"),
        ([*DEVICE, "--temperature", "0.8"], "temperature 0.8: speculation_method fused samples on the device"),
        ([*DEVICE, "--speculation_method", "eagle", "--temperature", "0.8"], "speculation_method eagle samples on"),
        (["--compile", "never"], "compile never needs backend neuron, not auto"),
        (["--device_sampling"], "device_sampling needs backend neuron, not auto"),
        (["--backend", "torch", "--speculation_method", "eagle"], "eagle needs backend neuron, not torch"),
        (["--neuron_config", "{}"], "neuron_config needs backend neuron, not auto"),
        (["--backend", "neuron", "--tp_degree", "0"], "tp_degree 0 is below 1"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config([*flags, "--output", str(tmp_path), "--topologies", "target,fused"])


def test_a_baseline_chooses_where_the_pair_does() -> None:
    """Else a measured speed-up would hold that of sampling on the device: both do, or neither."""
    on_device = BackendConfig("neuron", device_sampling=True)
    for server in SERVERS[:2]:
        assert "--device_sampling" in flags_of(on_device, server)
        assert "--device_sampling" not in flags_of(NEURON, server)
    assert parse_config([*DEVICE, "--topologies", "target,fused"]).backend.device_sampling
    with pytest.raises(ConfigError, match="device_sampling is for topologies target and fused"):
        parse_config([*DEVICE, "--topologies", "target,fused,distributed"])


def test_a_pair_whose_tokens_the_host_chooses_may_sample() -> None:
    config = parse_config(["--backend", "neuron", "--topologies", "target,fused", "--temperature", "0.8"])
    assert config.backend.keeps_seeds


def test_what_can_be() -> None:
    flags = ["--backend", "neuron", "--topologies", "target,fused", "--speculation-method", "vanilla", "--gamma", "3,5"]
    config = parse_config([*flags, "--temperature", "0.8", "--draft-models", "ngram", "--tp-degree", "2"])
    assert (config.backend.tp_degree, config.backend.num_draft_cores) == (2, 2)
    assert config.servers == (ServerPlan("target"), ServerPlan("fused_target", "ngram"))
    assert parse_config(["--backend", "neuron", "--topologies", "target", "--gamma", "1,2"]).gammas == (1, 2)


def test_servers_are_told_how_long_their_passes_take() -> None:
    config = parse_config(["--emulate", "target:25ms,draft:3ms"])
    told = [flags_of(config.backend, server) for server in SERVERS]
    assert told == ["--emulate target:25ms,draft:3ms"] * 3 + [""]  # prompt lookup has no passes


def test_a_device_is_not_emulated() -> None:
    with pytest.raises(ConfigError, match="emulate draft:3ms: backend neuron has a device"):
        parse_config(["--emulate", "draft:3ms", "--backend", "neuron"])
