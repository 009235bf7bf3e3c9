"""An audit (was each token the model's choice?) confirms a model's own output, and finds each changed token."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.inference.backends.pytorch.backend import TorchBackend
from specdec.inference.commit import TokenAudit
from specdec.inference.engine.target import TargetEngine
from specdec.inference.model.slots import Windows
from specdec.inference.request import GenerationRequest
from specdec.inference.serving.assembly import running
from specdec.inference.speculation.slot_decoder import SlotDecoder
from tests.support.answers import opened_and_commits
from tests.support.engine_contract import MODES, PROMPT, REGEX, completed, onnx_engine, wanted
from tests.support.models import save_tiny_model, tiny_model

MAX_LENGTH = 128


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "target", "llama", seed=1)


@pytest.fixture
async def engine(path: Path) -> AsyncGenerator[TargetEngine, None]:
    async with running(onnx_engine(path, MAX_LENGTH)) as engine:
        yield engine


async def audits_of(engine: TargetEngine, request: GenerationRequest, output: Sequence[int]) -> tuple[TokenAudit, ...]:
    asked = replace(request.resumed(output), audits=True, max_new_tokens=1)
    session = engine.open(asked, grammar=await engine.compiled(asked))
    opened, _ = await opened_and_commits(engine.answer(session))
    return opened.audits


@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("mode", MODES)
async def test_all_tokens_of_an_output_are_choices(
    engine: TargetEngine, mode: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit finds each token of a model's own output to be the model's choice.

    It does so whether it reads the output in parts or whole, or finds the output's beginning still in a slot.
    """
    monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", chunk)
    tokens, _ = await completed(engine, wanted(mode))
    for _ in range(2):
        audits = await audits_of(engine, wanted(mode), tokens)
        assert [(each.token_id, each.choice, each.margin, each.rank) for each in audits] == [
            (token_id, token_id, 0.0, 1) for token_id in tokens
        ]


@pytest.mark.parametrize("mode", MODES)
async def test_another_token_is_found_with_the_choice_in_its_place(engine: TargetEngine, mode: str) -> None:
    tokens, _ = await completed(engine, wanted(mode))
    for place in (0, 7, len(tokens) - 1):
        changed = [*tokens[:place], (tokens[place] + 1) % 256, *tokens[place + 1 :]]
        audits = await audits_of(engine, wanted(mode), changed)
        assert all(each.is_choice for each in audits[:place])
        found = audits[place]
        assert (found.token_id, found.choice) == (changed[place], tokens[place])
        assert found.margin > 0
        assert found.rank > 1
        rest, _ = await completed(engine, wanted(mode).resumed(changed[: place + 1]))
        assert [each.choice for each in audits[place + 1 : place + 2]] == rest[: len(audits) - place - 1][:1]


async def test_another_seed_or_temperature_is_found(engine: TargetEngine) -> None:
    tokens, _ = await completed(engine, wanted("noise"))
    for change in ({"seed": 8}, {"temperature": 0.0}, {"temperature": 1.2}):
        request = replace(wanted("noise"), sampling=replace(wanted("noise").sampling, **change))
        audits = await audits_of(engine, request, tokens)
        assert sum(not each.is_choice for each in audits) > len(tokens) / 8


async def test_a_token_that_truncation_removes_has_an_infinite_margin(engine: TargetEngine) -> None:
    request = wanted("noise")
    (first,) = await audits_of(engine, replace(request, sampling=replace(request.sampling, top_k=1)), [5])
    assert first.margin == math.inf or first.is_choice
    assert first.rank <= 2


@pytest.mark.parametrize("chunk", [3, 256])
async def test_a_token_that_the_grammar_refuses_is_the_last(
    engine: TargetEngine, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", chunk)
    request = wanted(grammar=REGEX, stop_at_eos=True)
    tokens, _ = await completed(engine, request)
    assert all(each.is_choice for each in await audits_of(engine, request, tokens))
    refused = [*tokens[:4], ord("A"), *tokens[5:]]
    audits = await audits_of(engine, request, refused)
    assert [each.is_choice for each in audits] == [True] * 4 + [False]
    assert audits[-1].margin == math.inf


async def test_a_request_without_an_audit_has_none(engine: TargetEngine) -> None:
    opened, _ = await opened_and_commits(engine.generate(wanted().resumed([5, 6])))
    assert opened.audits == ()


def test_the_prompt_is_not_audited() -> None:
    assert wanted().resumed([1, 2]).output_start == len(PROMPT)


async def test_windows_leave_no_rounding_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit gives the same margins, bit by bit, whether it reads a text in parts of 11 tokens or of 256.

    That holds for a model in bfloat16 whose backend computes attention in windows of fixed sizes.
    """
    backend = TorchBackend(tiny_model("llama").to(torch.bfloat16), num_slots=2, max_length=64, windows=Windows(16, 2))
    found = []
    async with running(TargetEngine(SlotDecoder(backend))) as engine:
        for chunk in (11, 256):
            monkeypatch.setattr("specdec.inference.engine.batching.MAX_PART_TOKENS", chunk)
            audits = await audits_of(engine, wanted(prompt=PROMPT[:9], cache_salt=str(chunk)), range(40))
            found.append([each.margin for each in audits])
    assert found[0] == found[1]
    assert min(found[0]) >= 0.0 < max(found[0])
