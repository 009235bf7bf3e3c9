"""A step of NxDI's own graphs may fail at any point: the steps after it give the same tokens as without the failure.

The test suite `BackendContract` checks the same for the neuron backend that keeps each sequence in a slot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.inference.backends.registry import load_decoder
from specdec.inference.model.decoder import Decoder, Turn
from specdec.inference.request import SamplingParams
from specdec.inference.speculation.slot_decoder import decide
from tests.conftest import ModelDirectories
from tests.support.faults import assert_faults_cost_no_token
from tests.support.neuron.checkpoints import save_medusa_target
from tests.unit.backends.neuron import test_device_target, test_fused, test_medusa

pytestmark = pytest.mark.usefixtures("on_real")


def medusa(models: ModelDirectories, folder: Path) -> Decoder:
    config = test_medusa.config(save_medusa_target(folder, num_heads=test_medusa.NUM_HEADS))
    decoder = load_decoder(config, config, decide)
    assert decoder is not None
    return decoder


DECODERS = {
    "fused, tokens chosen by the host": lambda models, _: test_fused.load(models.target, models.related),
    "fused": lambda models, _: test_fused.load_greedy(models.target, models.related),
    "the target alone": lambda models, _: test_device_target.load(models.target),
    "medusa": medusa,
}
MARKS = dict.fromkeys(DECODERS, pytest.mark.long) | {"the target alone": ()}


@pytest.mark.parametrize("load", [pytest.param(DECODERS[name], id=name, marks=marks) for name, marks in MARKS.items()])
def test_a_step_that_fails_anywhere_costs_no_token(load: Any, models: ModelDirectories, tmp_path: Path) -> None:
    decoder = load(models, tmp_path)

    def begun() -> list[Turn]:
        prompts = [[5, 6, 7], [9, 10]][: decoder.num_slots]
        return [Turn(slot, 0, prompt, SamplingParams(), gamma=3) for slot, prompt in enumerate(prompts)]

    assert_faults_cost_no_token(decoder, begun, ("specdec.inference.backends",))
