"""NxDI's fused graph under the engine gives exact greedy tokens, and refuses by name what it cannot do.

Each rule that our code keeps is needed: without it a test fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.special import chdtrc  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM

from specdec.inference.backends.neuron.decoders import fused, graph_decoder
from specdec.inference.backends.neuron.decoders.device_decoder import DeviceDecoder
from specdec.inference.backends.neuron.decoders.fused import FusedDecoder, load_fused_decoder
from specdec.inference.backends.neuron.decoders.graph_decoder import GraphDecoder
from specdec.inference.backends.neuron.graphs import calls as calls_module
from specdec.inference.backends.neuron.graphs import settings
from specdec.inference.config import FusedConfig, ModelConfig, NeuronOptions, ProposerConfig
from specdec.inference.engine.target import EngineLimits, TargetEngine
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.model.decoder import Turn, Verdict, check_seed
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
    assert_noticed,
    generate_all,
    greedy_reference,
    requests,
)
from tests.support.nxdi import Nxdi

K = 4
DO_SAMPLE = {"do_sample": True, "dynamic": True}
SAMPLING = {"on_device_sampling_config": DO_SAMPLE}

Calls = list[tuple[str, tuple[int, ...]]]


def pair(target: Path, draft: Path, *, method: str = "fused", **options: Any) -> tuple[ModelConfig, ModelConfig]:
    """Return the settings of a pair in float32, with three slots and K tokens a step, then changed by `options`."""
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
    """Load a pair with a graph that accepts draft tokens itself, on the device."""
    decoder = load(target, draft, device_sampling=True, **options)
    assert isinstance(decoder, FusedDecoder)
    return decoder


def engine(decoder: GraphDecoder) -> TargetEngine:
    return TargetEngine(decoder, EngineLimits(gamma=K))


@pytest.mark.parametrize("on_device", [False, True])
async def test_greedy_equals_transformers(models: ModelDirectories, calls: Calls, on_device: bool) -> None:
    wanted = requests(9, seed=4, sampled=False)
    decoder = load(models.target, models.related, device_sampling=on_device)
    answers = await generate_all(engine(decoder), wanted)
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, wanted)
    assert {shape for graph, shape in calls if graph == "fused"} >= {(1, 1), (2, 1), (3, 1)}


@pytest.mark.parametrize("method", ["fused", "vanilla"])
async def test_the_fused_topology_chooses_by_method(models: ModelDirectories, calls: Calls, method: str) -> None:
    """A fused server runs the method that was chosen, one graph or two slot models, with the target's tokens."""
    wanted = [replace(request, max_new_tokens=9) for request in requests(4, seed=7, sampled=False)]
    target, draft = pair(models.target, models.related, method=method)
    config = FusedConfig(target, ProposerConfig(draft.path, draft, 3), gamma=K, adaptive_gamma=False)
    async with target_engine(config, max_waiting=8) as running:
        answers = [answer_of(await commits_of(running.engine.generate(request))) for request in wanted]
        assert running.engine.seed_invariant
    assert [token_ids for token_ids, _ in answers] == greedy_reference(models.target, wanted)
    assert ("fused" in {graph for graph, _ in calls}) == (method == "fused")


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


def test_a_sampling_eagle_refuses_seeds(models: ModelDirectories, tmp_path: Path) -> None:
    draft = save_eagle_draft(tmp_path / "eagle", "eagle")
    decoder = load(models.target, draft, method="eagle")
    sampling = SamplingParams(temperature=0.7, top_k=20)
    with pytest.raises(InvalidRequestError, match="seed"):
        check_seed(engine(decoder), sampling)
    check_seed(engine(decoder), SamplingParams())
    decoder.check(GenerationRequest((3, 4), sampling))
    for change, message in (({"top_k": 300}, "top_k 300"), ({"min_p": 0.1}, "min_p 0.1")):
        with pytest.raises(InvalidRequestError, match=message):
            decoder.check(GenerationRequest((3, 4), replace(sampling, **change)))


async def test_eagle_samples(models: ModelDirectories, tmp_path: Path) -> None:
    decoder = load(models.target, save_eagle_draft(tmp_path / "eagle", "eagle"), method="eagle")
    sampled = GenerationRequest((3, 4), SamplingParams(temperature=1.5, top_k=50), max_new_tokens=20)
    ((token_ids, _),) = await generate_all(engine(decoder), [sampled])
    assert 1 <= len(token_ids) <= 20


LAW = SamplingParams(temperature=8.0, top_k=2)
PROMPT = (5, 6, 7)
NUM_LAW_TOKENS = 3
NUM_ROUNDS = 100  # of three sequences


def exact_law(models: ModelDirectories) -> dict[tuple[int, ...], float]:
    """Return the probability that the target gives to every output of NUM_LAW_TOKENS tokens."""
    model = AutoModelForCausalLM.from_pretrained(models.target)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_LAW_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in law.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            values, ids = logits.topk(LAW.top_k)
            shares = (values / LAW.temperature).softmax(-1)
            longer |= {
                (*tokens, token): probability * share
                for token, share in zip(ids.tolist(), shares.tolist(), strict=True)
            }
        law = longer
    return law


def sampled_outputs(decoder: GraphDecoder) -> list[tuple[int, ...]]:
    outputs = []
    for _ in range(NUM_ROUNDS):
        sequences = [list(PROMPT) for _ in range(decoder.num_slots)]
        starts = [0] * decoder.num_slots
        while any(len(tokens) < len(PROMPT) + NUM_LAW_TOKENS for tokens in sequences):
            turns = [
                Turn(slot, starts[slot], list(tokens), LAW, gamma=K)
                for slot, tokens in enumerate(sequences)
                if len(tokens) < len(PROMPT) + NUM_LAW_TOKENS
            ]
            for turn, verdict in zip(turns, decoder.step(turns), strict=True):
                starts[turn.slot] = len(turn.token_ids) + len(verdict.token_ids) - 1
                sequences[turn.slot] += verdict.token_ids
        outputs += [tuple(tokens[len(PROMPT) :][:NUM_LAW_TOKENS]) for tokens in sequences]
    return outputs


def p_value(outputs: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of a chi-squared test; 0 if an output is impossible."""
    if not set(outputs) <= law.keys():
        return 0.0
    counts = Counter(outputs)
    expected = {output: len(outputs) * probability for output, probability in law.items()}
    statistic = sum((counts[output] - number) ** 2 / number for output, number in expected.items())
    return float(chdtrc(len(law) - 1, statistic))


@pytest.mark.release  # on the double, as test_exactness.py
@pytest.mark.long
@pytest.mark.parametrize("loses", [None, "temperature", "top_k"])
def test_eagle_that_samples_has_the_target_s_law(
    models: ModelDirectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: str | None
) -> None:
    """Outputs that EAGLE samples have the probabilities that the target gives them.

    This shows that temperature and top_k reach the device: without them the probabilities would differ.
    """
    torch.manual_seed(1)
    device = DeviceDecoder._device_sampling
    lost = {
        "temperature": lambda self, sampling: (*device(self, sampling)[:2], 1.0),
        "top_k": lambda self, sampling: (3.0, *device(self, sampling)[1:]),
    }
    if loses is not None:
        monkeypatch.setattr(DeviceDecoder, "_device_sampling", lost[loses])
    decoder = load(models.target, save_eagle_draft(tmp_path / "eagle", "eagle"), method="eagle")
    value = p_value(sampled_outputs(decoder), exact_law(models))
    assert value > 1e-3 if loses is None else value < 1e-6


def test_greedy_modes_keep_seeds(models: ModelDirectories) -> None:
    assert load_greedy(models.target, models.related).seed_invariant


CONTRADICTIONS = [
    ({"overrides": SAMPLING}, "do_sample: speculation_method fused is greedy on the device"),
    (
        {"overrides": {"output_logits": False}},
        "output_logits False contradicts True, which is set by --device_sampling",
    ),
    ({"method": "vanilla", "device_sampling": True}, "device_sampling does not go with speculation_method vanilla"),
    ({"overrides": {"async_mode": True}}, "async_mode does not go with this server"),
    ({"overrides": {"speculation_length": 9}}, "speculation_length 9 contradicts 4, which is set by --gamma"),
    ({"overrides": {"context_encoding_buckets": [K, 32]}}, "a context bucket of 4 tokens"),
    ({"method": "eagle", "overrides": {"on_device_sampling_config": {"do_sample": True}}}, "do_sample needs dynamic"),
    ({"method": "eagle"}, r"is no eagle checkpoint: fc.weight is missing"),
    (
        {"method": "eagle", "overrides": {"on_device_sampling_config": {**DO_SAMPLE, "deterministic": True}}},
        "the law would not be the target's",
    ),
    ({"overrides": {"on_device_sampling_config": {"dynamic": True}}}, "samples the first token of a prompt alone"),
    ({"overrides": {"is_medusa": True}}, "is_medusa True contradicts False, which is set by --speculation_method"),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_settings_beyond_a_method_are_refused_at_start(
    models: ModelDirectories, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(models.target, models.related, **options)


def test_a_pair_takes_no_other_device_either(models: ModelDirectories) -> None:
    """A pair on backend neuron refuses --device, as one model does.

    It was once otherwise: --device cuda beside --backend neuron was refused for one model, and ignored for a pair.
    """
    target, draft = pair(models.target, models.related)
    with pytest.raises(ConfigError, match="device cuda: backend neuron takes the cores of NEURON_RT_VISIBLE_CORES"):
        load_fused_decoder(replace(target, device="cuda"), draft, decide)


def two_tokens_a_row(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, **{name: torch.cat([call[name]] * 2, 1) for name in ("input_ids", "position_ids")}}


fused_call, verdict_of, common = calls_module.fused_call, FusedDecoder._verdict, settings._common
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "padding is kept": (FusedDecoder, "_token_ids", lambda self, accepted, num_tokens: tuple(accepted.tolist())),
    "all K tokens count as accepted": (
        FusedDecoder,
        "_verdict",
        lambda self, turn, accepted, num_tokens: verdict_of(self, turn, accepted, K),
    ),
    "steps start one early": (
        fused,
        "fused_call",
        lambda rows: fused_call([replace(row, start=row.start - 1) for row in rows]),
    ),
    "prompts are never read": (
        FusedDecoder,
        "_goes_on",
        lambda self, turn: turn.start > 0 or len(turn.token_ids) == 1,
    ),
    "several tokens in a step": (fused, "fused_call", lambda rows: two_tokens_a_row(fused_call(rows))),
    "sampling_params left out": (fused, "fused_call", lambda rows: {**fused_call(rows), "sampling_params": None}),
    "slots in the order of turns": (graph_decoder, "sorted", lambda turns, key: list(turns)[::-1]),
    "no mask of seq_ids": (
        settings,
        "_common",
        lambda config, *, length: {**common(config, length=length), "apply_seq_ids_mask": False},
    ),
}


@pytest.mark.release  # on the double, as test_exactness.py
@pytest.mark.usefixtures("artifacts")
@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_broken_rule_is_noticed(
    models: ModelDirectories,
    nxdi: Nxdi,
    mutant: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if nxdi.is_real and mutant == "sampling_params left out":
        pytest.skip("a rule of graphs that were traced for a batch")
    monkeypatch.setattr(*MUTANTS[mutant], raising=False)
    wanted = requests(6, seed=4, sampled=False)
    await assert_noticed(lambda: engine(load_greedy(models.target, models.related)), wanted, models.target, caplog)


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
