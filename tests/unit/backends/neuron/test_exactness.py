"""Every topology on the double gives the tokens of Transformers, greedy and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.inference.backends.neuron.backend import NeuronBackend, load_neuron_backend
from specdec.inference.backends.pytorch.backend import load_torch_backend
from specdec.inference.config import ModelConfig
from specdec.inference.engine.draft import DraftEngine
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.request import GenerationRequest
from specdec.inference.speculation.model_proposer import ModelProposer
from specdec.inference.speculation.slot_decoder import SlotDecoder
from specdec.inference.speculation.speculative_decoder import SpeculativeDecoder
from tests.conftest import ModelDirectories
from tests.support.neuron.engines import (
    MAX_LENGTH,
    Answer,
    distribute_all,
    generate_all,
    greedy_reference,
    requests,
    target_engine,
)
from tests.support.neuron.slot_models import neuron_config

pytestmark = pytest.mark.release  # on the double; `make test-nxdi` runs it on NxDI's own sources in CI

GAMMA = 4


def neuron(path: Path, *, gamma: int = GAMMA) -> NeuronBackend:
    return load_neuron_backend(neuron_config(path, gamma=gamma, length=MAX_LENGTH))


@pytest.fixture(scope="module")
def sampled() -> list[GenerationRequest]:
    return requests(20, seed=3, sampled=True)


@pytest.fixture
async def expected(models: ModelDirectories, sampled: list[GenerationRequest]) -> list[Answer]:
    """Return the answers of the target alone on the torch backend, by the same noise."""
    torch_target = load_torch_backend(
        ModelConfig(models.target, sequence_length=MAX_LENGTH, num_slots=3, num_threads=1)
    )
    return await generate_all(target_engine(torch_target), sampled)


@pytest.mark.parametrize("gamma", [0, GAMMA])
async def test_the_target_alone_equals_transformers(models: ModelDirectories, gamma: int) -> None:
    greedy = requests(20, seed=2, sampled=False)
    answers = await generate_all(target_engine(neuron(models.target, gamma=gamma)), greedy)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, greedy)


async def test_the_target_alone_samples_the_same_tokens(
    models: ModelDirectories, sampled: list[GenerationRequest], expected: list[Answer]
) -> None:
    assert await generate_all(target_engine(neuron(models.target)), sampled) == expected


@pytest.mark.parametrize("draft_backend", ["neuron", "torch"])
async def test_distributed_samples_the_same_tokens(
    models: ModelDirectories, sampled: list[GenerationRequest], expected: list[Answer], draft_backend: str
) -> None:
    """Drafts on Neuron change no token, nor do drafts on a CPU."""
    if draft_backend == "neuron":
        draft = ModelProposer(neuron(models.related, gamma=0))
    else:
        draft = ModelProposer(
            load_torch_backend(ModelConfig(models.related, sequence_length=MAX_LENGTH, num_slots=3, num_threads=1))
        )
    answers, rate = await distribute_all(target_engine(neuron(models.target)), DraftEngine(draft), sampled)
    assert answers == expected
    assert 0.1 < rate < 0.9, "a draft that is always right, or never, would prove little"


async def test_two_slot_models_sample_the_same_tokens(
    models: ModelDirectories, sampled: list[GenerationRequest], expected: list[Answer]
) -> None:
    target = neuron(models.target)
    decoder = SpeculativeDecoder(SlotDecoder(target), ModelProposer(neuron(models.related, gamma=0)))
    engine = TargetEngine(decoder, EngineLimits(gamma=GAMMA))
    assert await generate_all(engine, sampled) == expected
