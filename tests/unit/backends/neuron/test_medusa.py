"""Medusa (draft heads on the target) gives exact greedy tokens, whichever paths of its token tree are accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.inference.backends.neuron.decoders.fused import compile_models
from specdec.inference.backends.neuron.decoders.medusa import MedusaDecoder
from specdec.inference.backends.neuron.graphs.medusa_tree import TreePass, tree_pass
from specdec.inference.backends.registry import load_decoder
from specdec.inference.config import ModelConfig, NeuronOptions
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.speculation.slot_decoder import decide
from tests.conftest import ModelDirectories
from tests.support.models import save_tiny_model
from tests.support.neuron.checkpoints import save_medusa_target
from tests.support.neuron.engines import MAX_LENGTH, generate_all, greedy_reference, requests

pytestmark = pytest.mark.usefixtures("on_real")

NUM_HEADS = 3
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]]
WIDTH = len(TREE) + 1
MEDUSA = {"medusa_speculation_length": WIDTH, "num_medusa_heads": NUM_HEADS, "medusa_tree": TREE}

Calls = list[tuple[str, tuple[int, ...]]]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_medusa_target(tmp_path_factory.mktemp("medusa"), num_heads=NUM_HEADS)


def config(path: Path, *, num_slots: int = 1, **changes: Any) -> ModelConfig:
    neuron = NeuronOptions(method="medusa", overrides={**MEDUSA, **changes})
    length = MAX_LENGTH + int(neuron.overrides["medusa_speculation_length"])
    return ModelConfig(
        path,
        backend="neuron",
        dtype="float32",
        sequence_length=length,
        beyond_positions=True,
        num_slots=num_slots,
        neuron=neuron,
    )


def load(path: Path, **changes: Any) -> MedusaDecoder:
    decoder = load_decoder(config(path, **changes), config(path, **changes), decide)
    assert isinstance(decoder, MedusaDecoder)
    return decoder


def engine(decoder: MedusaDecoder) -> TargetEngine:
    return TargetEngine(decoder, EngineLimits(gamma=WIDTH))


@pytest.mark.parametrize("spare", [0, 4])
async def test_greedy_equals_transformers(models: ModelDirectories, checkpoint: Path, calls: Calls, spare: int) -> None:
    """Medusa gives Transformers' greedy tokens, whether graphs are as wide as the tree or four tokens wider.

    Wider graphs have room to compute accepted tokens of the last tree again, whose KV cache lies at wrong positions.
    """
    wanted = requests(12, seed=11, sampled=False)
    running = engine(load(checkpoint, medusa_speculation_length=WIDTH + spare))
    answers = await generate_all(running, wanted)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, wanted)
    assert {graph for graph, _ in calls} == {"context", "medusa"}


async def test_paths_of_every_kind_are_accepted(checkpoint: Path, monkeypatch: Patch) -> None:
    """In these requests some passes accept no draft token, some accept neighbours in the pass, some scattered ones."""
    paths: list[tuple[int, int]] = []
    in_place = TreePass.num_in_place

    def spy(self: TreePass, path: list[int]) -> int:
        paths.append((len(path), in_place(self, path)))
        return in_place(self, path)

    monkeypatch.setattr(TreePass, "num_in_place", spy)
    await generate_all(engine(load(checkpoint)), requests(12, seed=11, sampled=False))
    assert {length for length, _ in paths} >= {0, 1, 2}
    assert sum(length > placed for length, placed in paths) >= 5
    assert sum(length == placed > 0 for length, placed in paths) >= 5


def test_a_pass_is_laid_out_depth_first() -> None:
    tree = tree_pass([7, 8], [(0,), (0, 0), (0, 1), (1,)], [[20, 21], [30, 31]], width=6)
    assert (tree.token_ids, tree.parents, tree.root) == ([7, 8, 20, 30, 31, 21], [-1, 0, 1, 2, 2, 1], 1)
    assert tree.depths == [0, 1, 2, 3, 3, 2]
    assert tree.ancestors(4) == [4, 2, 1, 0]
    assert tree.accepted([0, 20, 31, 0, 0, 0]) == [2, 4]
    assert tree.num_in_place([2, 4]) == 1
    assert tree.accepted([0, 9, 31, 0, 0, 0]) == []
    assert tree_pass([7, 8], [(0,), (0, 0), (0, 1), (1,)], [[20, 21], [30, 31]], width=4).token_ids == [7, 8, 20, 30]


def test_medusa_loads_the_model_compiled_ahead(checkpoint: Path, artifacts: Path, compiled_in: list[str]) -> None:
    compile_models(config(checkpoint), None)
    assert len(list(artifacts.iterdir())) == 1
    load(checkpoint)
    assert len(compiled_in) == 1


@pytest.mark.parametrize(
    ("sampling", "fields", "message"),
    [
        (SamplingParams(temperature=0.7), {}, r"temperature 0.7 .*speculation_method medusa"),
        (SamplingParams(presence_penalty=1.0), {}, "presence_penalty 1.0"),
        (SamplingParams(), {"logprobs": 2}, "logprobs 2"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    checkpoint: Path, sampling: SamplingParams, fields: dict[str, Any], message: str
) -> None:
    decoder = load(checkpoint)
    assert decoder.seed_invariant
    with pytest.raises(InvalidRequestError, match=message):
        decoder.check(GenerationRequest((3, 4), sampling, **fields))


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_slots": 2}, "use --batch 1, not 2"),
    ({"medusa_tree": None}, "medusa needs neuron_config medusa_tree"),
    ({"medusa_tree": [0, 1]}, r"must be a list of paths such as"),
    ({"medusa_tree": [[0], [1, 0]]}, r"has path \[1, 0\], but not \[1\] above it"),
    ({"medusa_tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "deeper than num_medusa_heads 3"),
    ({"medusa_tree": [[256]]}, r"ranks are 0..255"),
    ({"medusa_speculation_length": 5}, "medusa_speculation_length 5 is below 11: the 10 paths"),
    ({"num_medusa_heads": 4}, "medusa_head_3.0.linear.weight is missing"),
    ({"on_device_sampling_config": {"do_sample": True}}, "medusa is greedy only"),
    ({"context_encoding_buckets": [WIDTH, 32]}, "a context bucket of 11 tokens"),
    ({"sequence_parallel_enabled": True}, "medusa fails with sequence_parallel_enabled"),
    ({"is_medusa": False}, "is_medusa False contradicts True"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_models_that_do_not_fit_are_refused_at_start(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint, **changes)


def test_a_tree_as_wide_as_its_bucket_is_refused(checkpoint: Path) -> None:
    wide = replace(config(checkpoint, medusa_speculation_length=128), sequence_length=120)
    with pytest.raises(ConfigError, match="medusa_speculation_length 128: a context bucket may have as many"):
        load_decoder(wide, wide, decide)


def test_heads_must_be_there_and_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "plain", "llama", seed=1)
    with pytest.raises(ConfigError, match=r"medusa needs medusa_heads.pt"):
        load(path)
    (path / "medusa_heads.pt").write_bytes(b"no heads")
    with pytest.raises(ConfigError, match=r"medusa_heads.pt cannot be read"):
        load(path)
    heads = torch.load(checkpoint / "medusa_heads.pt", weights_only=True)
    heads["medusa_head_1.1.weight"] = torch.zeros(7, 32)
    torch.save(heads, path / "medusa_heads.pt")
    with pytest.raises(ConfigError, match=r"medusa_head_1.1.weight has shape \[7, 32\].* need \[288, 32\]"):
        load(path)
    with pytest.raises(ConfigError, match="for llama alone, not qwen3"):
        load(save_tiny_model(tmp_path / "qwen3", "qwen3"))
