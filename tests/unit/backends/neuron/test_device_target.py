"""A target without a draft chooses its tokens on the device: the baseline for fused pairs that choose there too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.backends.neuron.decoders.device_target import TargetDecoder
from specdec.inference.backends.registry import load_decoder
from specdec.inference.config import ModelConfig
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.speculation.slot_decoder import decide
from tests.conftest import ModelDirectories
from tests.support.neuron.engines import MAX_LENGTH, generate_all, greedy_reference, requests
from tests.support.neuron.slot_models import neuron_config
from tests.unit.backends.neuron.test_fused import engine

pytestmark = pytest.mark.usefixtures("on_real")

Calls = list[tuple[str, tuple[int, ...]]]


def config(path: Path, **options: Any) -> ModelConfig:
    """Return the settings of a target with three slots; gamma has no effect, since there is no draft."""
    return neuron_config(path, length=MAX_LENGTH - 4, gamma=3, device_sampling=True, **options)


def load(path: Path, **options: Any) -> TargetDecoder:
    decoder = load_decoder(config(path, **options), None, decide)
    assert isinstance(decoder, TargetDecoder)
    return decoder


@pytest.mark.parametrize("samples", [False, True])
async def test_greedy_equals_transformers(models: ModelDirectories, calls: Calls, samples: bool) -> None:
    """A target that chooses on the device gives Transformers' greedy tokens, whether its graphs can sample or not."""
    overrides = {} if samples else {"on_device_sampling_config": {"do_sample": False}}
    decoder = load(models.target, overrides=overrides)
    wanted = requests(9, seed=4, sampled=False)
    answers = await generate_all(engine(decoder), wanted)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, wanted)
    assert {graph for graph, _ in calls} == {"context", "token"}
    assert decoder.seed_invariant != samples


def test_all_tokens_are_as_many_as_the_device_sees(models: ModelDirectories, caplog: pytest.LogCaptureFixture) -> None:
    """A request without top_k is sampled with top_k 256, the device's largest; the log has one warning of it.

    Regression: a request without top_k, whose top_k is 0 for all tokens, was refused.
    """
    decoder = load(models.target)
    decoder.check(GenerationRequest((5, 6, 7), SamplingParams(temperature=1.0)))
    for _ in range(3):
        assert decoder._device_sampling(SamplingParams(temperature=0.5, top_p=0.9)) == (256.0, 0.9, 0.5)
    notices = [record for record in caplog.records if record.levelno == logging.WARNING and "top_k 0" in record.msg]
    assert [record.getMessage() for record in notices] == ["top_k 0 is 256 on this device: it looks at no more tokens"]
    assert decoder._device_sampling(SamplingParams(temperature=0.5, top_k=7)) == (7.0, 1.0, 0.5)
