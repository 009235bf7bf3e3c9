"""NxDI's fused graph (draft and target) gives exact greedy tokens; the error for other requests names what it lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.inference.backends.neuron.decoders.fused import FusedDecoder, load_fused_decoder
from specdec.inference.backends.neuron.decoders.graph_decoder import GraphDecoder
from specdec.inference.config import FusedConfig, ModelConfig, NeuronOptions, ProposerConfig
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import InvalidRequestError
from specdec.inference.model.decoder import Turn, Verdict
from specdec.inference.request import GenerationRequest, SamplingParams
from specdec.inference.serving.assembly import target_engine
from specdec.inference.speculation.slot_decoder import decide
from tests.conftest import ModelDirectories
from tests.support.answers import commits_of
from tests.support.models import save_tiny_model
from tests.support.neuron.checkpoints import save_eagle_draft
from tests.support.neuron.engines import (
    MAX_LENGTH,
    answer_of,
    generate_all,
    greedy_reference,
    requests,
)

K = 4
DO_SAMPLE = {"do_sample": True, "dynamic": True}

Calls = list[tuple[str, tuple[int, ...]]]


def pair(target: Path, draft: Path, *, method: str = "fused", **options: Any) -> tuple[ModelConfig, ModelConfig]:
    """Return the settings of target and draft: by default float32, three slots, and at most K tokens a step.

    Args:
        target: the folder of its checkpoint, and `draft` likewise.
        method: the speculation method.
        options: num_slots, width (the most tokens a step, in place of K), and fields of `NeuronOptions`.
    """
    num_slots, width = options.pop("num_slots", 3), options.pop("width", K)
    neuron = NeuronOptions(gamma=width, method=method, **options)
    config = ModelConfig(
        target,
        backend="neuron",
        dtype="float32",
        sequence_length=MAX_LENGTH + width,
        num_slots=num_slots,
        neuron=neuron,
    )
    return config, replace(config, path=draft, neuron=replace(neuron, gamma=0))


def load(target: Path, draft: Path, **options: Any) -> GraphDecoder:
    decoder = load_fused_decoder(*pair(target, draft, **options), decide)
    assert decoder is not None
    return decoder


def load_greedy(target: Path, draft: Path, **options: Any) -> FusedDecoder:
    """Load target and draft as one graph that decides on the device which draft tokens it accepts.

    Args:
        target: the folder of its checkpoint, and `draft` likewise.
        options: as of `pair`.
    """
    decoder = load(target, draft, device_sampling=True, **options)
    assert isinstance(decoder, FusedDecoder)
    return decoder


def engine(decoder: GraphDecoder) -> TargetEngine:
    return TargetEngine(decoder, EngineLimits(gamma=K))


@pytest.mark.parametrize("on_device", [False, True])
async def test_greedy_equals_transformers(models: ModelDirectories, calls: Calls, on_device: bool) -> None:
    wanted = requests(9, seed=4, sampled=False)
    decoder = load(models.target, models.related, device_sampling=on_device)
    assert decoder.seed_invariant
    answers = await generate_all(engine(decoder), wanted)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, wanted)
    assert {shape for graph, shape in calls if graph == "fused"} >= {(1, 1), (2, 1), (3, 1)}


@pytest.mark.parametrize("method", ["fused", "vanilla"])
async def test_the_fused_topology_chooses_by_method(models: ModelDirectories, calls: Calls, method: str) -> None:
    """With method fused a server loads one graph, with vanilla two models with slots; both give the target's tokens."""
    wanted = [replace(request, max_new_tokens=9) for request in requests(4, seed=7, sampled=False)]
    target, draft = pair(models.target, models.related, method=method)
    config = FusedConfig(target, ProposerConfig(draft.path, draft, 3), gamma=K, adaptive_gamma=False)
    async with target_engine(config, EngineLimits(8)) as running:
        answers = [answer_of(await commits_of(running.engine.generate(request))) for request in wanted]
        assert running.engine.seed_invariant
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, wanted)
    assert ("fused" in {graph for graph, _ in calls}) == (method == "fused")


@pytest.mark.usefixtures("on_real")
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
async def test_eagle_is_greedy_exact(models: ModelDirectories, tmp_path: Path, method: str) -> None:
    wanted = requests(6, seed=5, sampled=False)
    draft, target = save_eagle_draft(tmp_path / "eagle", method), models.target
    if method == "eagle3":  # reads three of its target's layers
        target = save_tiny_model(tmp_path / "target", "llama", seed=1, num_hidden_layers=8)
    answers = await generate_all(engine(load(target, draft, method=method)), wanted)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(target, wanted)


def turn(token_ids: list[int], start: int, slot: int = 0) -> Turn:
    return Turn(slot, start, token_ids, SamplingParams(), gamma=K)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_equal_draft_commits_k_tokens_a_step(models: ModelDirectories, on_device: bool) -> None:
    decoder = load(models.target, models.target, device_sampling=on_device)
    tokens = [5, 6, 7]
    (first,) = decoder.step([turn(tokens, 0)])
    assert first == Verdict(first.token_ids, 0, 0)
    tokens += first.token_ids
    for _ in range(3):
        (verdict,) = decoder.step([turn(tokens, len(tokens) - 1)])
        assert (verdict.num_draft_tokens, verdict.num_accepted_tokens, len(verdict.token_ids)) == (K - 1, K - 1, K)
        tokens += verdict.token_ids


def test_prompts_and_steps_share_a_pass(models: ModelDirectories, calls: Calls) -> None:
    decoder = load(models.target, models.related)
    (first,) = decoder.step([turn([5, 6, 7], 0, slot=2)])
    calls.clear()
    verdicts = decoder.step([turn([5, 6, 7, *first.token_ids], 3, slot=2), turn([8, 9, 4], 0, slot=0)])
    assert calls == [("context", (1, 3)), ("fused", (1, 1))]
    assert len(verdicts[1].token_ids) == 1


def test_a_prompts_part_chooses_no_token(models: ModelDirectories) -> None:
    decoder = load(models.target, models.related)
    (part,) = decoder.step([replace(turn([5, 6], 0), chooses=False)])
    assert part.token_ids == ()
    (whole,) = decoder.step([turn([5, 6, 7], 2)])
    (again,) = decoder.step([turn([5, 6, 7], 0)])
    assert whole.token_ids == again.token_ids


REFUSED = [
    (
        SamplingParams(temperature=0.7),
        {},
        r"temperature 0.7 .*speculation_method fused.*without --device_sampling it is",
    ),
    (SamplingParams(repetition_penalty=1.2), {}, "penalty"),
    (SamplingParams(logit_bias=((5, 1.0),)), {}, "logit_bias"),
    (SamplingParams(), {"logprobs": 2}, "logprobs 2"),
    (SamplingParams(), {"prompt_logprobs": 2}, "prompt_logprobs 2"),
    (SamplingParams(), {"min_new_tokens": 2}, "min_new_tokens 2"),
    (SamplingParams(), {"prompt_token_ids": (3,) * 33}, "the prompt has 33 tokens, the compiled prompt graph reads 32"),
]


@pytest.mark.parametrize(("sampling", "fields", "message"), REFUSED)
def test_parameters_beyond_the_graph_are_refused_by_name(
    models: ModelDirectories, sampling: SamplingParams, fields: dict[str, Any], message: str
) -> None:
    decoder = load_greedy(models.target, models.related, overrides={"max_context_length": 32})
    with pytest.raises(InvalidRequestError, match=message):
        engine(decoder).open(GenerationRequest(**{"prompt_token_ids": (3, 4), "sampling": sampling, **fields}))


TREES = {
    "two chains": {"0": ["1", "2"], "1": ["3"], "2": ["4"]},
    "wide and deep": {"0": ["1", "2", "3"], "1": ["4", "5"], "4": ["6"]},
}


@pytest.mark.usefixtures("on_real")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
async def test_a_token_tree_gives_the_target_s_tokens(
    models: ModelDirectories, tmp_path: Path, tree: dict[str, list[str]]
) -> None:
    """An EAGLE draft that proposes a tree of tokens leaves the target's tokens unchanged."""
    draft = save_eagle_draft(tmp_path / "draft", "eagle")
    width = 1 + sum(map(len, tree.values()))
    decoder = load(models.target, draft, method="eagle", width=width, overrides={"token_tree_config": tree})
    wanted = requests(6, seed=4, sampled=False)
    answers = await generate_all(TargetEngine(decoder, EngineLimits(gamma=width)), wanted)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, wanted)
