"""The neuron backend with slots gives the logits of Transformers, whatever its slots were used for before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.inference.backends.neuron.backend import NeuronBackend, load_neuron_backend
from specdec.inference.model.slots import Span, max_pass_draft_tokens, prompt_chunk_tokens
from tests.support.backend_contract import (
    MAX_LENGTH,
    NUM_SLOTS,
    BackendContract,
    Move,
    assert_matches,
    reference,
)
from tests.support.neuron.slot_models import GAMMA, checkpoint, neuron_config, slot_backend

K = GAMMA + 1
TOKENS = tuple(range(20, 20 + MAX_LENGTH))

Calls = list[tuple[str, tuple[int, ...]]]


class TestContract(BackendContract):
    tolerance = 1e-3
    max_examples = 24
    families: Collection[str] = ("llama", "qwen3")

    def load(self, family: str) -> NeuronBackend:
        return slot_backend(family)


class TestContractWithoutDrafts(TestContract):
    """Runs the tests that all backends share, for models compiled with gamma 0: passes have one token per slot."""

    families = ("llama",)
    faults = ("more slots",)

    def load(self, family: str) -> NeuronBackend:
        return slot_backend(family, gamma=0)


def test_one_slot_alone_is_a_full_batch() -> None:
    backend = load_neuron_backend(neuron_config(checkpoint("llama"), num_slots=1))
    plain = reference("llama")
    assert_matches(backend, plain, [[Move(0, 0, TOKENS[:7], 1)], [Move(0, 0.75, TOKENS[9:13], 1)]], tolerance=1e-3)


def test_a_prompt_with_proposal_is_one_call(calls: Calls) -> None:
    backend = slot_backend()
    backend.forward([Span(0, 0, TOKENS[:10], num_logits=3)])
    assert calls == [("context", (1, 8)), ("speculation", (1, K))]


def test_spans_of_various_widths_share_passes(calls: Calls) -> None:
    backend = slot_backend()
    backend.forward([Span(slot, 0, TOKENS[:5], 1) for slot in range(NUM_SLOTS)])
    calls.clear()
    backend.forward([Span(2, 5, TOKENS[5:6], 1), Span(0, 5, TOKENS[5:8], 3), Span(1, 5, TOKENS[5:11], 6)])
    assert calls == [("speculation", (3, K)), ("speculation", (1, K))]
    calls.clear()
    backend.forward([Span(0, 8, TOKENS[8:9], 1), Span(2, 6, TOKENS[6:7], 1)])
    assert calls == [("token", (2, 1))]


def test_an_exact_backend_runs_no_graph_of_one_token(calls: Calls) -> None:
    """With `--exact always` a pass of one token per slot runs the graph of K tokens, not the graph of one token.

    The two graphs may choose other tokens, so without this another session's draft tokens could change an answer.
    """
    backend = load_neuron_backend(replace(neuron_config(checkpoint("llama")), exact="always"))
    backend.forward([Span(0, 0, TOKENS[:5], 1), Span(1, 0, TOKENS[:5], 1)])
    calls.clear()
    logits = backend.forward([Span(0, 5, TOKENS[5:6], 1), Span(1, 5, TOKENS[5:6], 1)])
    assert calls == [("speculation", (2, K))]
    expected = np.repeat(reference("llama").logits(TOKENS[:6])[-1:], 2, axis=0)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


def test_a_long_later_span_is_read_from_the_start(calls: Calls) -> None:
    backend = slot_backend(gamma=0)
    backend.forward([Span(0, 0, TOKENS[:3], 1)])
    calls.clear()
    logits = backend.forward([Span(0, 2, TOKENS[5:14], 1)])
    assert calls == [("context", (1, 11))]
    expected = reference("llama").logits((*TOKENS[:2], *TOKENS[5:14]))[-1:]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("overrides", [{"max_context_length": 9}, {"context_encoding_buckets": [3, 9]}])
def test_a_long_prompt_continues_in_passes(calls: Calls, overrides: dict[str, Any]) -> None:
    config = neuron_config(checkpoint("llama"), overrides=overrides)
    backend = load_neuron_backend(config)
    logits = backend.forward([Span(1, 0, TOKENS[:12], 1)])
    assert calls == [("context", (1, 9)), ("speculation", (1, K))]
    np.testing.assert_allclose(logits, reference("llama").logits(TOKENS[:12])[-1:], rtol=0, atol=1e-3)


def test_a_prefix_is_reused_where_few_passes_read_the_rest(calls: Calls) -> None:
    backend = slot_backend()
    assert [backend.goes_on(8, 8 + num_left) for num_left in (1, 4 * K, 4 * K + 1)] == [True, True, False]
    for num_left, expected in ((4 * K, [("speculation", (1, K))] * 4), (4 * K + 1, [("context", (1, 5 + 4 * K))])):
        backend.forward([Span(0, 0, TOKENS[:4], 1)])
        calls.clear()
        backend.forward([Span(0, 4, TOKENS[4 : 4 + num_left], 1)])
        assert calls == expected


def test_a_span_behind_the_slot_is_an_error() -> None:
    with pytest.raises(ValueError, match="slot 0 holds 0 tokens, a span starts at 3"):
        slot_backend().forward([Span(0, 3, TOKENS[:2], 1)])


def test_slot_bytes_draft_tokens_and_prompt_length_are_those_compiled() -> None:
    backend = slot_backend()
    num_layers, num_kv_heads, head_dim = 2, 2, 8
    assert backend.slot_bytes == num_layers * 2 * num_kv_heads * head_dim * (MAX_LENGTH + K) * 4
    assert max_pass_draft_tokens(backend, default=16) == GAMMA
    assert prompt_chunk_tokens(backend) == MAX_LENGTH


LONG = tuple(20 + position * 7 % 260 for position in range(300))


def assert_exact(lengths: Sequence[int], widths: Sequence[int], **options: Any) -> None:
    """Assert that logits of prompts, each followed by passes that continue it, are Transformers'.

    Args:
        lengths: of the prompts, in tokens.
        widths: tokens of each pass after a prompt, in order.
        options: as of `neuron_config`.
    """
    path = checkpoint("llama", max_position_embeddings=512)
    backend = load_neuron_backend(neuron_config(path, **options))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    for length in lengths:
        ends = list(accumulate(widths, initial=length))
        logits = [backend.forward([Span(1, 0, LONG[:length], 1)])]
        logits += [backend.forward([Span(1, start, LONG[start:end], end - start)]) for start, end in pairwise(ends)]
        with torch.no_grad():
            expected = model(torch.tensor([LONG[: ends[-1]]])).logits[0, length - 1 :].numpy()
        np.testing.assert_allclose(np.concatenate(logits), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"context_encoding_buckets": [32, 128, 290], "token_generation_buckets": [64, 128, 300]}],
    ids=["NxDI's own", "named"],
)
def test_every_bucket_gives_the_logits_of_a_fresh_forward(calls: Calls, overrides: dict[str, Any]) -> None:
    """For every bucket (a length that graphs are compiled for), logits are those of a forward without a cache.

    Lengths lie on both sides of each bucket's end, up to the last position; some prompts have one or two tokens.
    """
    lengths = (1, 2, 3, 31, 32, 64, 126, 127, 128, 129, 255, 280, 290)
    assert_exact(lengths, (K, 1), length=296, overrides=overrides)
    assert {graph for graph, _ in calls} == {"context", "speculation", "token"}


@pytest.mark.usefixtures("on_real")
@pytest.mark.usefixtures("cpu_mode")
def test_cpu_mode_at_more_than_one_bucket() -> None:
    """NxDI's CPU mode works with several buckets, the lengths that graphs are compiled for.

    Regression: CPU mode has one mask for all buckets, and failed for slots above 128 positions.
    """
    assert_exact((1, 7, 200), (1,), length=300, gamma=0, overrides={"on_cpu": True})
