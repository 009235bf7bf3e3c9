"""Wrong variants of our part of vLLM, which the checks of `test_engine.py` notice; each start takes a minute."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from inference.config import ServerConfig
from inference.model.decoder import Turn
from inference.request import GenerationRequest
from inference.serving.assembly import running
from inference.vllm import engine as engine_module
from inference.vllm.choice import Choice, Span, Winners
from inference.vllm.options import VllmModel
from inference.vllm.translation import KEY, extra_args
from tests.support.engine_contract import Drafting, completed, onnx_engine, wanted
from tests.vllm.conftest import FLAGS, MAX_LENGTH, Pair

pytestmark = pytest.mark.release

Patch = Callable[[pytest.MonkeyPatch], None]


def noise_is_one_position_off(patch: pytest.MonkeyPatch) -> None:
    turn_of = Choice._turn

    def shifted(self: Choice, span: Span) -> Turn | None:
        turn = turn_of(self, span)
        return None if turn is None else replace(turn, token_ids=turn.token_ids[:-1])

    patch.setattr(Choice, "_turn", shifted)


def drafts_are_accepted_unverified(patch: pytest.MonkeyPatch) -> None:
    winners_of = Choice.winners

    def believing(self: Choice, spans: Sequence[Span], rows_of: Any) -> list[Winners]:
        won = winners_of(self, spans, rows_of)
        return [replace(each, token_ids=[*spans[each.place].proposal, each.token_ids[-1]]) for each in won]

    patch.setattr(Choice, "winners", believing)


def penalties_count_from_the_resumed_start(patch: pytest.MonkeyPatch) -> None:
    def restarted(request: GenerationRequest, *others: Any) -> dict[str, Any]:
        ours = extra_args(request, *others)
        ours[KEY]["output_start"] = len(request.prompt_token_ids)
        return ours

    patch.setattr(engine_module, "extra_args", restarted)


async def differing(engine: Any, tokens: list[int]) -> set[str]:
    """Return in which ways the engine's output differs from our own engine's."""
    request, drafting = wanted("penalties"), Drafting(tokens, 0.3, random.Random(1))
    got = {
        "plain": (await completed(engine, request))[0],
        "drafted": (await completed(engine, request, drafting))[0],
        "resumed": tokens[:20] + (await completed(engine, request.resumed(tokens[:20])))[0],
    }
    return {way for way, output in got.items() if output != tokens}


@pytest.mark.parametrize(
    ("variant", "noticed"),
    [
        (noise_is_one_position_off, {"plain", "drafted", "resumed"}),
        (drafts_are_accepted_unverified, {"drafted"}),
        (penalties_count_from_the_resumed_start, {"resumed"}),
    ],
)
async def test_a_wrong_variant_is_noticed(
    variant: Patch, noticed: set[str], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of vLLM are forked from this one, so that they have its patches."""
    from inference.serving.vllm_target import vllm_engine

    async with running(onnx_engine(pair.target, MAX_LENGTH)) as onnx:
        tokens, _ = await completed(onnx, wanted("penalties"))
    variant(monkeypatch)
    async with vllm_engine(VllmModel(pair.target, FLAGS, gamma=16), ServerConfig(max_waiting=2)) as (held, _):
        assert await differing(held.engine, tokens) == noticed
