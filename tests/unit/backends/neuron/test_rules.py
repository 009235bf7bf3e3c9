"""Every rule of NxDI that the slot backend keeps is needed: a backend that breaks one fails on NxDI's double.

A mutant breaks exactly one rule. It may raise an error or give wrong logits; both count as noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.inference.backends.neuron import backend as slots
from specdec.inference.backends.neuron.backend import NeuronBackend, load_neuron_backend
from specdec.inference.backends.neuron.graphs import application, calls, plan, settings, shape
from specdec.inference.backends.neuron.graphs.calls import Row
from specdec.inference.backends.neuron.graphs.plan import Reading
from specdec.inference.model.slots import Span
from tests.support.backend_contract import MAX_LENGTH, Move, assert_matches, reference
from tests.support.neuron.slot_models import GAMMA, checkpoint, neuron_config
from tests.support.nxdi import Nxdi

TOKENS = tuple(range(20, 20 + MAX_LENGTH))

# A full batch and parts of it, prompts beside passes, one token per slot, a rollback, the last position.
HISTORY = [
    [Move(0, 0, TOKENS[:7], 0.5), Move(1, 0, TOKENS[3:8], 0), Move(2, 0, TOKENS[3:5], 1)],
    [Move(2, 1, TOKENS[8:9], 1), Move(0, 1, TOKENS[7:8], 1), Move(1, 1, TOKENS[2:3], 1)],
    [Move(2, 1, TOKENS[8:13], 1), Move(0, 1, TOKENS[7:9], 1), Move(1, 1, TOKENS[2:4], 1)],
    [Move(1, 1, TOKENS[9:10], 1)],
    [Move(0, 0.5, TOKENS[9:13], 1), Move(1, 0, TOKENS[:1], 1)],
    [Move(2, 1, TOKENS[1:3], 1), Move(0, 1, TOKENS[2:3], 1), Move(1, 1, TOKENS[4:6], 1)],
    [Move(2, 1, TOKENS[:8], 0.2)],
    [Move(2, 1, TOKENS[:6], 0.2)],
    [Move(2, 1, TOKENS[:1], 1), Move(0, 1, TOKENS[:1], 1)],
    [Move(1, 0, TOKENS[:3], 0.3)],
]

Call = dict[str, Any]
Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def play() -> None:
    backend = load_neuron_backend(neuron_config(checkpoint("llama")))
    assert_matches(backend, reference("llama"), HISTORY, tolerance=1e-3)


def test_the_history_of_the_tests_below_holds() -> None:
    play()


def replaced(module: Any, name: str, value: Any) -> Mutant:
    return lambda patch: patch.setattr(module, name, value)


def passes(change: Callable[[Call], Call]) -> Mutant:
    call = calls.continued_call
    return replaced(slots, "continued_call", lambda rows, *, width: change(call(rows, width=width)))


def prompts(change: Callable[[Call], Call]) -> Mutant:
    call = calls.prompt_call
    return replaced(slots, "prompt_call", lambda row, *, widest: change(call(row, widest=widest)))


def configured(**changes: Any) -> Mutant:
    common = settings._common
    return replaced(settings, "_common", lambda config, *, length: {**common(config, length=length), **changes})


def mask_before(column: Callable[[torch.Tensor], torch.Tensor]) -> Mutant:
    """Let each row of a pass attend to all that lies before a column, which `column` chooses from its positions."""

    def change(call: Call) -> Call:
        ends = column(call["position_ids"])
        return {**call, "attention_mask": (torch.arange(int(ends.max())) < ends).long()}

    return passes(change)


def rows_in_the_order_of_spans(works: Sequence[Reading], *, width: int) -> tuple[list[Row], int]:
    rows, taken = plan.next_rows(works, width=width)
    order = [work.slot for work in works]
    return sorted(rows, key=lambda row: order.index(row.slot)), taken


def prompts_read_to_their_end(work: Reading, *, width: int, max_prompt: int) -> Row | None:
    """Let the prompt graph give the logits of every token of a prompt."""
    return plan.prompt_row(replace(work, first_wanted=work.end), width=width, max_prompt=max_prompt)


def padding_in_front(rows: Sequence[Row], *, width: int) -> Call:
    front = [replace(row, token_ids=[*[0] * (width - len(row.token_ids)), *row.token_ids]) for row in rows]
    return calls.continued_call(front, width=width)


def no_positions_reserved(patch: Patch) -> None:
    slot_shape = shape.slot_shape
    patch.setattr(slots, "slot_shape", lambda *arguments: replace(slot_shape(*arguments), reserved=0))
    config = neuron_config
    patch.setitem(play.__globals__, "neuron_config", lambda path: config(path, length=MAX_LENGTH - GAMMA - 1))


def a_context_bucket_of_k(patch: Patch) -> None:
    patch.setattr(settings, "_shape_faults", lambda *_: ())
    configured(context_encoding_buckets=[GAMMA + 1, MAX_LENGTH + GAMMA + 1])(patch)


def prompts_longer_than_the_prompt_graph(patch: Patch) -> None:
    configured(max_context_length=3)(patch)
    slot_shape = shape.slot_shape
    patch.setattr(slots, "slot_shape", lambda *arguments: replace(slot_shape(*arguments), max_prompt=MAX_LENGTH))


def moved_back(span: Span, held: Any) -> Reading:
    """Break rollback: treat more of the slot as written than was kept."""
    return plan.reading(replace(span, start=span.start + (span.start > 0)), held)


MUTANTS: dict[str, Mutant] = {
    "no mask": passes(lambda call: {**call, "attention_mask": None} if call["input_ids"].shape[1] > 1 else call),
    "mask of ones": passes(lambda call: {**call, "attention_mask": torch.ones_like(call["attention_mask"])}),
    "mask one short": mask_before(lambda positions: positions[:, :1] - 1),
    "mask over the tokens too": mask_before(lambda positions: positions[:, -1:] + 1),
    "no sampling_params": passes(lambda call: {**call, "sampling_params": None}),
    "no sampling_params with a prompt": prompts(lambda call: {**call, "sampling_params": None}),
    "sampling_params of two": passes(lambda call: {**call, "sampling_params": call["sampling_params"][:, :2]}),
    "sampling_params of integers": passes(lambda call: {**call, "sampling_params": call["sampling_params"].long()}),
    "rows in the order of spans": replaced(slots, "next_rows", rows_in_the_order_of_spans),
    "seq_ids from zero": passes(lambda call: {**call, "seq_ids": torch.arange(len(call["seq_ids"]))}),
    "prompts all in slot 0": prompts(lambda call: {**call, "seq_ids": torch.zeros(1, dtype=torch.long)}),
    "partial batches without the mask of seq_ids": configured(apply_seq_ids_mask=False),
    "prompts in passes": replaced(slots, "prompt_row", lambda work, **_: None),
    "prompts of two slots at once": prompts(lambda call: {name: torch.cat([it, it]) for name, it in call.items()}),
    "prompts read to their end": replaced(slots, "prompt_row", prompts_read_to_their_end),
    "positions off by one": passes(lambda call: {**call, "position_ids": call["position_ids"] + 1}),
    "padding in front": replaced(slots, "continued_call", padding_in_front),
    "passes as wide as their tokens": replaced(
        slots,
        "continued_call",
        lambda rows, *, width: calls.continued_call(rows, width=max(len(row.token_ids) for row in rows)),
    ),
    "passes one wider": replaced(slots, "next_rows", lambda works, *, width: plan.next_rows(works, width=width + 1)),
    "no graph of one token": replaced(
        application, "_with_one_token_graph", lambda base: type(base.__name__, (base,), {})
    ),
    "no positions reserved": no_positions_reserved,
    "tokens chosen on the device": configured(on_device_sampling_config={}),
    "a context bucket of K": a_context_bucket_of_k,
    "prompts longer than the prompt graph": prompts_longer_than_the_prompt_graph,
    # A prompt of one token was answered from the padding after it, on every backend of NxDI, without an error.
    "short prompts come as they are": replaced(
        slots, "prompt_call", lambda row, *, widest: calls.prompt_call(row, widest=0)
    ),
    "what slots hold is forgotten": replaced(slots, "reading", moved_back),
}
ON_A_DEVICE = ["no sampling_params", "no sampling_params with a prompt", "sampling_params of integers"]
"""Rules of graphs that were traced with tensors of one shape and type; eager code on a CPU takes others."""


@pytest.mark.usefixtures("artifacts")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_rule_is_noticed(nxdi: Nxdi, mutant: str, monkeypatch: Patch) -> None:
    if nxdi.is_real and mutant in ON_A_DEVICE:
        pytest.skip("a rule of graphs that were traced")
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, AttributeError, IndexError, TypeError, ValueError)) as caught:
        play()
    print(caught.type.__name__, str(caught.value).strip().splitlines()[:2])  # with -rP: how each of them fails


def test_one_token_passes_never_use_the_wide_graph() -> None:
    """A pass in which each slot reads one token runs the graph of one token, which is faster than the wide one."""
    backend: NeuronBackend = load_neuron_backend(neuron_config(checkpoint("llama")))
    rows, width = plan.next_rows([Reading(0, (1, 2, 3), 2, 2), Reading(1, (1, 2), 1, 1)], width=GAMMA + 1)
    assert width == 1
    assert [row.slot for row in rows] == [0, 1]
    assert backend.max_pass_tokens == GAMMA + 1
