"""Tests that wrong variants of this project's code in vLLM each fail a check of its tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from specdec.inference.config import ServerConfig
from specdec.inference.model.decoder import Turn
from specdec.inference.request import GenerationRequest
from specdec.inference.serving.assembly import running
from specdec.inference.vllm import engine, options, runner_v1
from specdec.inference.vllm.options import VllmModel
from specdec.inference.vllm.translation import KEY, carried
from specdec.inference.vllm.worker import Worker
from tests.support.engine_contract import Drafting, completed, onnx_engine, wanted
from tests.vllm.conftest import FLAGS, LAW, MAX_LENGTH, Pair
from tests.vllm.same_text_run import believing, one_off
from tests.vllm.test_runner_v2 import engine_on_v2, right_tokens

pytestmark = pytest.mark.release

PENALTIES = "penalties of the output"
EXTRA_ARGS = runner_v1.extra_args


class NoiseOneOff(Worker):
    """Wrong vLLM worker: it chooses a position's token with the random numbers of the position before."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        turn_of = runner_v1.turn_of

        def shifted(token_ids: Sequence[int], proposal: Sequence[int], extra_args: Mapping[str, Any]) -> Turn:
            return turn_of(token_ids[:-1], proposal, extra_args)

        runner_v1.turn_of = shifted
        super().load_model(*arguments, **options)


class Believing(Worker):
    """Wrong vLLM worker: it accepts every draft token."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        chosen = runner_v1.chosen

        def believing(turns: Sequence[Turn], rows: Any) -> list[list[int]]:
            pairs = zip(turns, chosen(turns, rows), strict=True)
            return [[*turn.proposal, tokens[-1]] for turn, tokens in pairs]

        runner_v1.chosen = believing
        super().load_model(*arguments, **options)


class OneOffOnV2(Worker):
    """Wrong vLLM worker on model runner V2: in passes with draft tokens it uses the next position's random numbers."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        super().load_model(*arguments, **options)
        rejection_sampler.rejection_sample = one_off(rejection_sampler.rejection_sample)


class BelievingOnV2(Worker):
    """Wrong vLLM worker on model runner V2: it accepts every draft token."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        super().load_model(*arguments, **options)
        rejection_sampler.rejection_sample = believing(rejection_sampler.rejection_sample)


def restarted_on_v2(request: GenerationRequest, *others: Any) -> dict[str, Any]:
    """Return wrong fields for vLLM's worker: the output so far of a resumed request counts as its prompt.

    So its penalties differ.
    """
    return carried(request, *others) | {"output_start": len(request.prompt_token_ids)}


def restarted(request: GenerationRequest, *others: Any) -> dict[str, Any]:
    """Return wrong `extra_args` of a request: the output so far of a resumed request counts as its prompt.

    So its penalties differ.
    """
    ours = EXTRA_ARGS(request, *others)
    ours[KEY]["output_start"] = len(request.prompt_token_ids)
    return ours


async def differing(engine: Any, right: Mapping[str, list[int]]) -> set[str]:
    """Run five checks on an engine; return the names of those that fail, as tokens differ from those in `right`."""
    tokens, request = right[PENALTIES], wanted(PENALTIES)
    got = {
        "noise": (await completed(engine, wanted("noise")))[0] == right["noise"],
        "plain": (await completed(engine, request))[0] == tokens,
        "drafted noise": (await completed(engine, wanted("noise"), Drafting(right["noise"], 0.3, random.Random(2))))[0]
        == right["noise"],
        "drafted": (await completed(engine, request, Drafting(tokens, 0.3, random.Random(1))))[0] == tokens,
        "resumed": (await completed(engine, request.resumed(tokens[:20])))[0] == tokens[20:],
    }
    return {way for way, is_right in got.items() if not is_right}


@pytest.mark.parametrize(
    ("module", "name", "variant", "noticed"),
    [
        (options, "WORKER", f"{__name__}.NoiseOneOff", {"noise"}),
        (options, "WORKER", f"{__name__}.Believing", {"drafted"}),
        (runner_v1, "extra_args", restarted, {"resumed"}),
    ],
    ids=["noise one position off", "drafts unverified", "penalties from the resumed start"],
)
async def test_a_wrong_variant_is_noticed(
    module: ModuleType, name: str, variant: Any, noticed: set[str], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.inference.serving.vllm_target import vllm_engine

    async with running(onnx_engine(pair.target, MAX_LENGTH, LAW)) as onnx:
        right = {mode: (await completed(onnx, wanted(mode)))[0] for mode in ("noise", PENALTIES)}
    monkeypatch.setattr(module, name, variant)
    async with vllm_engine(VllmModel(pair.target, FLAGS, gamma=16), ServerConfig(max_waiting=2, lookup=False)) as (
        held,
        _,
    ):
        assert await differing(held.engine, right) >= noticed


@pytest.mark.parametrize(
    ("module", "name", "variant", "noticed"),
    [
        (options, "WORKER", f"{__name__}.OneOffOnV2", {"drafted noise"}),
        (options, "WORKER", f"{__name__}.BelievingOnV2", {"drafted", "drafted noise"}),
        (engine, "carried", restarted_on_v2, {"resumed"}),
    ],
    ids=["noise one position off", "drafts unverified", "penalties from the resumed start"],
)
async def test_a_wrong_variant_on_runner_v2_is_noticed(
    module: ModuleType, name: str, variant: Any, noticed: set[str], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = await right_tokens(pair, {mode: wanted(mode) for mode in ("noise", PENALTIES)})
    monkeypatch.setattr(module, name, variant)
    async with engine_on_v2(pair, monkeypatch) as held:
        assert await differing(held, right) >= noticed
