"""The contract of every slot backend: `BackendContract`, a class of tests from which each backend's tests inherit.

A slot backend runs a model over several sequences, each of which has a slot, its part of the KV cache. The main test
draws random histories of writes, overwrites and rollbacks, and checks the logits after each: those of a span
(consecutive tokens of one slot in a forward pass) must equal those of plain Transformers, without a KV cache, over all
tokens that the slot should then contain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specdec.inference.backends.pytorch.graphs import Run
from specdec.inference.model.slots import Backend, ForkingBackend, Span
from tests.support.faults import strikes
from tests.support.models import DEFAULT_VOCAB_SIZE, tiny_model

NUM_SLOTS = 3
MAX_LENGTH = 24


@dataclass(frozen=True)
class Move:
    """Input of one slot to a forward pass: how much of the slot's content to keep, and the token ids to append.

    Attributes:
        keep: share, 0 to 1, of the tokens in the slot that stay, from the first one on; the others are dropped.
        token_ids: token ids that follow the kept ones.
        wanted: share, 0 to 1, of `token_ids` whose logits the pass returns, those of the last ones.
    """

    slot: int
    keep: float  # part of the held tokens that stays; 1 is plain decoding, 0 is reuse by another sequence
    token_ids: tuple[int, ...]
    wanted: float  # share of the new tokens that logits are wanted of


TOKENS = tuple(range(20, 20 + MAX_LENGTH))

# Prefill, a round of verification on top of it, a rollback into it, a second sequence beside; then all slots at once
# and not in their order.
HISTORY = [
    [Move(0, 0, TOKENS[:7], 1), Move(2, 0, TOKENS[3:5], 1)],
    [Move(2, 1, TOKENS[8:13], 1), Move(0, 1, TOKENS[7:8], 1)],
    [Move(0, 0.75, TOKENS[9:13], 1), Move(1, 0, TOKENS[:1], 1)],
    [Move(2, 1, TOKENS[8:10], 1), Move(0, 1, TOKENS[7:9], 1), Move(1, 1, TOKENS[2:4], 1)],
    [Move(1, 1, TOKENS[9:10], 1), Move(2, 1, TOKENS[1:2], 1), Move(0, 1, TOKENS[2:3], 1)],
]


def moves(slot: int) -> st.SearchStrategy[Move]:
    tokens = st.lists(st.integers(0, DEFAULT_VOCAB_SIZE - 1), min_size=1, max_size=8).map(tuple)
    share = st.one_of(st.sampled_from((0.0, 1.0)), st.floats(0, 1))
    return st.builds(Move, slot=st.just(slot), keep=share, token_ids=tokens, wanted=share)


def passes() -> st.SearchStrategy[list[Move]]:
    """Return a Hypothesis strategy for the input of a forward pass: a `Move` for one or more slots, in any order."""
    some_slots = st.permutations(range(NUM_SLOTS)).flatmap(
        lambda slots: st.integers(1, NUM_SLOTS).map(lambda count: slots[:count])
    )
    return some_slots.flatmap(lambda slots: st.tuples(*(moves(slot) for slot in slots)).map(list))


histories = st.lists(passes(), min_size=1, max_size=5)


class Reference:
    """Plain Transformers without a KV cache: each logit comes from one forward pass over the whole sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.logits = lru_cache(maxsize=4096)(self._logits)

    def _logits(self, token_ids: tuple[int, ...]) -> np.ndarray[Any, Any]:  # [num_tokens, vocab_size]
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([token_ids]), use_cache=False)
        logits: np.ndarray[Any, Any] = output.logits[0].float().numpy()
        return logits

    def generated(self, prompt: Sequence[int], num_new_tokens: int) -> list[int]:
        """Return the ids of the prompt and, after them, of `num_new_tokens` that Transformers generates greedily."""
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": num_new_tokens}
        generated: list[int] = self._model.generate(torch.tensor([prompt]), **settings)[0].tolist()
        return generated


@lru_cache(maxsize=1)
def reference(family: str) -> Reference:
    return Reference(tiny_model(family))


def assert_matches(
    backend: Backend, plain: Reference, history: Sequence[Sequence[Move]], *, tolerance: float = 1e-4
) -> None:
    """Run a history (passes in their order) on a backend; check that every logit is the reference's to `tolerance`."""
    held: dict[int, tuple[int, ...]] = dict.fromkeys(range(NUM_SLOTS), ())
    for one_pass in history:
        spans = [_span(move, held) for move in one_pass]
        logits = backend.forward(spans)
        expected = [plain.logits(held[span.slot])[len(held[span.slot]) - span.num_logits :] for span in spans]
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, np.concatenate(expected), rtol=0, atol=tolerance)


def _span(move: Move, held: dict[int, tuple[int, ...]]) -> Span:
    """Turn a move into a span that fits its slot, and store in `held` which tokens the slot contains after it."""
    token_ids = move.token_ids
    start = min(round(move.keep * len(held[move.slot])), MAX_LENGTH - len(token_ids))
    held[move.slot] = (*held[move.slot][:start], *token_ids)
    return Span(move.slot, start, token_ids, num_logits=round(move.wanted * len(token_ids)))


BROKEN = {
    "no span": ([], "at least one span"),
    "no token": ([Span(0, 0, (), 0)], "0 tokens from 0"),
    "too many tokens": ([Span(0, 0, (1,) * (MAX_LENGTH + 1), 1)], f"{MAX_LENGTH + 1} tokens from 0"),
    "behind the last position": ([Span(0, MAX_LENGTH, (1,), 1)], f"1 tokens from {MAX_LENGTH} do not fit"),
    "before the first position": ([Span(0, -1, (1, 2), 1)], "2 tokens from -1"),
    "a slot too many": ([Span(NUM_SLOTS, 0, (1,), 1)], f"slot {NUM_SLOTS} is outside 0..{NUM_SLOTS - 1}"),
    "a slot below 0": ([Span(-1, 0, (1,), 1)], "slot -1 is outside"),
    "more logits than tokens": ([Span(0, 0, (1,), 2)], "num_logits 2 is outside 0..1"),
    "fewer logits than none": ([Span(0, 0, (1,), -1)], "num_logits -1 is outside 0..1"),
    "a slot twice": ([Span(1, 0, (1,), 1), Span(1, 1, (1,), 1)], r"share a slot: \[1, 1\]"),
    "a token too high": ([Span(0, 0, (1, DEFAULT_VOCAB_SIZE), 1)], f"token id {DEFAULT_VOCAB_SIZE} is outside 0..287"),
    "a token below 0": ([Span(0, 0, (-1,), 1)], "token id -1 is outside"),
}


FAULTS = {
    "another slot": ([0], 1, [1], 1),
    "another number of tokens": ([0], 1, [0], 3),
    "one slot of two": ([0, 1], 2, [2, 1], 2),
    "other neighbours": ([0, 1], 1, [1, 2], 1),
    "more slots": ([2, 0], 1, [0, 1, 2], 2),
}
"""Pairs of passes, by how they differ: one that works, and the next one, which fails.

Each has the slots of the first pass and its number of tokens per slot, then both of the second pass.
"""
HELD = 4


SHARED: dict[tuple[object, str], Backend] = {}
"""Loaded backends that several tests use, by test class and model family."""


class BackendContract:
    """Tests that every slot backend must pass. A subclass implements `load`, and may extend the class attributes.

    `families` names the model families of `tiny_model` to test. `faults` names the entries of FAULTS to test: a
    subclass may name only the one that runs most of its code, if another subclass tests that code with all of them.
    """

    families: Collection[str] = ("llama",)
    faults: Collection[str] = tuple(FAULTS)
    tolerance = 1e-4
    max_examples = 8

    def load(self, family: str) -> Backend:
        """Return a new backend over `tiny_model(family)`, with NUM_SLOTS slots of MAX_LENGTH positions."""
        raise NotImplementedError

    def fresh(self) -> Backend:
        """Return a backend that no other test uses; a subclass may return the shared one if loading is slow."""
        return self.load("llama")

    @classmethod
    def shared(cls, family: str) -> Backend:
        """Return the backend that all tests of a family share; tokens that one leaves in the slots must not matter."""
        if (cls, family) not in SHARED:
            SHARED[cls, family] = cls().load(family)
        return SHARED[cls, family]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with a parameter `family` or `fault` once for each entry of `families` or `faults`."""
        for name, values in (("family", self.families), ("fault", self.faults)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    def assert_close(self, logits: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
        np.testing.assert_allclose(logits, expected, rtol=0, atol=self.tolerance)

    def test_any_history_gives_the_logits_of_a_fresh_forward(self, family: str) -> None:
        backend, plain = self.shared(family), reference(family)

        @settings(max_examples=self.max_examples, deadline=None, suppress_health_check=list(HealthCheck))
        @example(history=HISTORY)
        @given(history=histories)
        def check(history: list[list[Move]]) -> None:
            assert_matches(backend, plain, history, tolerance=self.tolerance)

        check()

    def test_greedy_text_is_that_of_generate(self, family: str) -> None:
        """The logits over a greedy text of Transformers have their maximum at the text's next token.

        It is checked at every position, with one token per pass and with four.
        """
        backend, text = self.shared(family), reference(family).generated(TOKENS[:3], MAX_LENGTH - 3)
        for width in (1, 4):
            parts = [(start, text[start : start + width]) for start in range(0, MAX_LENGTH, width)]
            logits = [backend.forward([Span(0, start, tokens, len(tokens))]) for start, tokens in parts]
            assert np.concatenate(logits).argmax(axis=1).tolist()[2:-1] == text[3:]

    def test_a_start_off_by_one_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The contract's checks fail for a wrong backend, which writes one position too late except at position 0."""
        backend = self.fresh()
        forward = backend.forward

        def off(spans: Sequence[Span]) -> Any:
            return forward([replace(span, start=span.start + (span.start > 0)) for span in spans])

        monkeypatch.setattr(backend, "forward", off)
        with pytest.raises((AssertionError, ValueError), match=r"Not equal to tolerance|a span starts at"):
            assert_matches(backend, reference("llama"), HISTORY)

    def test_logits_are_those_of_the_spans_ends(self) -> None:
        spans = [Span(2, 0, TOKENS[:5], 2), Span(1, 0, TOKENS[5:9], 0), Span(0, 0, TOKENS[9:12], 3)]
        logits = self.fresh().forward(spans)
        assert logits.shape == (5, DEFAULT_VOCAB_SIZE)
        self.assert_close(logits[:2], reference("llama").logits(TOKENS[:5])[3:])
        self.assert_close(logits[2:], reference("llama").logits(TOKENS[9:12]))

    def test_a_pass_without_logits_writes_keys(self) -> None:
        backend = self.fresh()
        logits = backend.forward([Span(0, 0, TOKENS[:5], 0), Span(1, 0, TOKENS[:2], 0)])
        assert logits.shape == (0, DEFAULT_VOCAB_SIZE)
        assert logits.dtype == np.float32
        logits = backend.forward([Span(0, 5, TOKENS[5:6], 1)])
        self.assert_close(logits, reference("llama").logits(TOKENS[:6])[5:])

    def test_a_pass_that_fails_anywhere_spoils_no_other(self, fault: str) -> None:
        """After a pass that runs out of memory, at any line of its code, other passes still give the right logits.

        Regression: memory ran out when half of a pass's inputs were set, and the next pass read another user's slot.
        """
        backend, plain = self.fresh(), reference("llama")
        held = [TOKENS[slot : slot + HELD] for slot in range(NUM_SLOTS)]
        backend.forward([Span(slot, 0, held[slot], 0) for slot in range(NUM_SLOTS)])

        def run(slots: list[int], width: int) -> None:
            new = [TOKENS[9 + slot : 9 + slot + width] for slot in slots]
            logits = backend.forward([Span(slot, HELD, ids, width) for slot, ids in zip(slots, new, strict=True)])
            expected = [plain.logits((*held[slot], *ids))[HELD:] for slot, ids in zip(slots, new, strict=True)]
            self.assert_close(logits, np.concatenate(expected))

        working, failing = FAULTS[fault][:2], FAULTS[fault][2:]
        run(*working)
        number = 1
        while strikes(lambda: run(*failing), number, ("specdec.inference.backends",)):
            run(*working)
            number += 1
        assert number > 10

    def test_the_last_position_can_be_used(self) -> None:
        backend = self.fresh()
        backend.forward([Span(0, 0, TOKENS[:-1], 0)])
        logits = backend.forward([Span(0, MAX_LENGTH - 1, TOKENS[-1:], 1)])
        self.assert_close(logits, reference("llama").logits(TOKENS)[-1:])

    @pytest.mark.parametrize(("spans", "message"), BROKEN.values(), ids=BROKEN)
    def test_a_broken_contract_is_an_error_and_writes_nothing(self, spans: list[Span], message: str) -> None:
        backend = self.shared("llama")
        backend.forward([Span(slot, 0, TOKENS[:3], 0) for slot in range(NUM_SLOTS)])
        with pytest.raises(ValueError, match=message):
            backend.forward(spans)
        logits = backend.forward([Span(slot, 3, TOKENS[3:4], 1) for slot in range(NUM_SLOTS)])
        self.assert_close(logits, np.repeat(reference("llama").logits(TOKENS[:4])[3:], NUM_SLOTS, axis=0))

    def test_the_result_outlives_the_next_pass(self) -> None:
        backend = self.fresh()
        logits = backend.forward([Span(0, 0, TOKENS[:3], 3)])
        kept = logits.copy()
        backend.forward([Span(0, 0, TOKENS[5:8], 3)])
        np.testing.assert_array_equal(logits, kept)

    def test_it_describes_itself(self) -> None:
        backend = self.fresh()
        assert (backend.vocab_size, backend.num_slots) == (DEFAULT_VOCAB_SIZE, NUM_SLOTS)
        assert backend.max_length == MAX_LENGTH
        assert backend.slot_bytes > 0

    def test_a_fork_continues_like_its_source(self) -> None:
        backend = self.fresh()
        if not isinstance(backend, ForkingBackend):
            pytest.skip("this backend cannot fork, and says so")
        backend.forward([Span(0, 0, TOKENS[:5], 0), Span(1, 0, TOKENS[9:11], 0)])
        backend.fork(0, 1, 2, 5)  # the destination keeps its own two tokens before
        both = backend.forward([Span(0, 5, TOKENS[5:7], 2), Span(1, 0, TOKENS[:2], 0), Span(2, 0, TOKENS[:1], 0)])
        self.assert_close(both, reference("llama").logits(TOKENS[:7])[5:])
        self.assert_close(backend.forward([Span(1, 5, TOKENS[5:7], 2)]), reference("llama").logits(TOKENS[:7])[5:])


class Uncompiled:
    """Stand-in for a compiler of fixed-shape passes: it returns each function uncompiled, and counts them."""

    name, arithmetic, graphs_only = "left as they are", "", False

    def __init__(self) -> None:
        self.num_graphs = 0

    def make(self, run: Run) -> Run:
        """Count `run` as one graph; return it as it is, uncompiled."""
        self.num_graphs += 1
        return run
