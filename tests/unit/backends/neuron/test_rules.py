"""Every rule of NxDI that the slot backend keeps is there for a reason: a backend that breaks one fails on the double.

A mutant breaks exactly one rule. Whether it raises or gives wrong logits is NxDI's choice; both fail here.
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


def play() -> None:
    backend = load_neuron_backend(neuron_config(checkpoint("llama")))
    assert_matches(backend, reference("llama"), HISTORY, tolerance=1e-3)


def test_the_history_of_the_tests_below_holds() -> None:
    play()


def change_passes(patch: Patch, change: Callable[[Call], Call]) -> None:
    call = calls.continued_call
    patch.setattr(slots, "continued_call", lambda rows, *, width: change(call(rows, width=width)))


def change_prompts(patch: Patch, change: Callable[[Call], Call]) -> None:
    call = calls.prompt_call
    patch.setattr(slots, "prompt_call", lambda row, *, widest: change(call(row, widest=widest)))


def change_settings(patch: Patch, **changes: Any) -> None:
    common = settings._common
    patch.setattr(settings, "_common", lambda config, *, length: {**common(config, length=length), **changes})


def no_mask(patch: Patch) -> None:
    change_passes(patch, lambda call: {**call, "attention_mask": None} if call["input_ids"].shape[1] > 1 else call)


def mask_of_ones(patch: Patch) -> None:
    change_passes(patch, lambda call: {**call, "attention_mask": torch.ones_like(call["attention_mask"])})


def mask_one_short(patch: Patch) -> None:
    def change(call: Call) -> Call:
        starts = call["position_ids"][:, :1] - 1
        return {**call, "attention_mask": (torch.arange(int(starts.max())) < starts).long()}

    change_passes(patch, change)


def mask_over_the_tokens_too(patch: Patch) -> None:
    def change(call: Call) -> Call:
        ends = call["position_ids"][:, -1:] + 1
        return {**call, "attention_mask": (torch.arange(int(ends.max())) < ends).long()}

    change_passes(patch, change)


def no_sampling_params(patch: Patch) -> None:
    change_passes(patch, lambda call: {**call, "sampling_params": None})


def no_sampling_params_with_a_prompt(patch: Patch) -> None:
    change_prompts(patch, lambda call: {**call, "sampling_params": None})


def sampling_params_of_two(patch: Patch) -> None:
    change_passes(patch, lambda call: {**call, "sampling_params": call["sampling_params"][:, :2]})


def sampling_params_of_integers(patch: Patch) -> None:
    change_passes(patch, lambda call: {**call, "sampling_params": call["sampling_params"].long()})


def rows_in_the_order_of_spans(patch: Patch) -> None:
    def next_rows(works: Sequence[Reading], *, width: int) -> tuple[list[Row], int]:
        rows, taken = plan.next_rows(works, width=width)
        order = [work.slot for work in works]
        return sorted(rows, key=lambda row: order.index(row.slot)), taken

    patch.setattr(slots, "next_rows", next_rows)


def seq_ids_from_zero(patch: Patch) -> None:
    change_passes(patch, lambda call: {**call, "seq_ids": torch.arange(len(call["seq_ids"]))})


def prompts_all_in_slot_zero(patch: Patch) -> None:
    change_prompts(patch, lambda call: {**call, "seq_ids": torch.zeros(1, dtype=torch.long)})


def partial_batches_without_the_mask_of_seq_ids(patch: Patch) -> None:
    change_settings(patch, apply_seq_ids_mask=False)


def prompts_in_passes(patch: Patch) -> None:
    patch.setattr(slots, "prompt_row", lambda work, **_: None)


def prompts_of_two_slots_at_once(patch: Patch) -> None:
    def change(call: Call) -> Call:
        return {name: torch.cat([tensor, tensor]) for name, tensor in call.items()}

    change_prompts(patch, change)


def prompts_read_to_their_end(patch: Patch) -> None:
    """Let the prompt graph give the logits of every token."""

    def row(work: Reading, *, width: int, max_prompt: int) -> Row | None:
        return plan.prompt_row(replace(work, first_wanted=work.end), width=width, max_prompt=max_prompt)

    patch.setattr(slots, "prompt_row", row)


def positions_off_by_one(patch: Patch) -> None:
    change_passes(patch, lambda call: {**call, "position_ids": call["position_ids"] + 1})


def padding_in_front(patch: Patch) -> None:
    def change(rows: Sequence[Row], *, width: int) -> Call:
        front = [replace(row, token_ids=[*[0] * (width - len(row.token_ids)), *row.token_ids]) for row in rows]
        return call(front, width=width)

    call = calls.continued_call
    patch.setattr(slots, "continued_call", change)


def passes_as_wide_as_their_tokens(patch: Patch) -> None:
    call = calls.continued_call

    def change(rows: Sequence[Row], *, width: int) -> Call:
        return call(rows, width=max(len(row.token_ids) for row in rows))

    patch.setattr(slots, "continued_call", change)


def passes_one_wider(patch: Patch) -> None:
    patch.setattr(slots, "next_rows", lambda works, *, width: plan.next_rows(works, width=width + 1))


def no_graph_of_one_token(patch: Patch) -> None:
    patch.setattr(application, "_with_one_token_graph", lambda base: type(base.__name__, (base,), {}))


def no_positions_reserved(patch: Patch) -> None:
    slot_shape = shape.slot_shape
    patch.setattr(slots, "slot_shape", lambda *arguments: replace(slot_shape(*arguments), reserved=0))
    config = neuron_config
    patch.setitem(play.__globals__, "neuron_config", lambda path: config(path, length=MAX_LENGTH - GAMMA - 1))


def tokens_chosen_on_the_device(patch: Patch) -> None:
    change_settings(patch, on_device_sampling_config={})


def a_context_bucket_of_k(patch: Patch) -> None:
    patch.setattr(settings, "_shape_faults", lambda *_: ())
    change_settings(patch, context_encoding_buckets=[GAMMA + 1, MAX_LENGTH + GAMMA + 1])


def prompts_longer_than_the_prompt_graph(patch: Patch) -> None:
    change_settings(patch, max_context_length=3)
    slot_shape = shape.slot_shape
    patch.setattr(slots, "slot_shape", lambda *arguments: replace(slot_shape(*arguments), max_prompt=MAX_LENGTH))


def short_prompts_come_as_they_are(patch: Patch) -> None:
    """Break the rule that pads short prompts.

    The story: a prompt of one token was answered from the padding after it, on every backend of NxDI, without an error.
    """
    call = calls.prompt_call
    patch.setattr(slots, "prompt_call", lambda row, *, widest: call(row, widest=0))


def what_slots_hold_is_forgotten(patch: Patch) -> None:
    """Break rollback: it takes more of the slot for written than was kept."""
    read = plan.reading
    patch.setattr(slots, "reading", lambda span, held: read(replace(span, start=span.start + (span.start > 0)), held))


MUTANTS = [
    no_mask,
    mask_of_ones,
    mask_one_short,
    mask_over_the_tokens_too,
    no_sampling_params,
    no_sampling_params_with_a_prompt,
    sampling_params_of_two,
    sampling_params_of_integers,
    rows_in_the_order_of_spans,
    seq_ids_from_zero,
    prompts_all_in_slot_zero,
    partial_batches_without_the_mask_of_seq_ids,
    prompts_in_passes,
    prompts_of_two_slots_at_once,
    prompts_read_to_their_end,
    positions_off_by_one,
    padding_in_front,
    passes_as_wide_as_their_tokens,
    passes_one_wider,
    no_graph_of_one_token,
    no_positions_reserved,
    tokens_chosen_on_the_device,
    a_context_bucket_of_k,
    prompts_longer_than_the_prompt_graph,
    short_prompts_come_as_they_are,
    what_slots_hold_is_forgotten,
]


ON_A_DEVICE = [no_sampling_params, no_sampling_params_with_a_prompt, sampling_params_of_integers]
"""Rules of graphs that were traced with tensors of one shape and type; eager code on a CPU takes others."""


@pytest.mark.usefixtures("artifacts")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.__name__))
def test_a_broken_rule_is_noticed(nxdi: Nxdi, mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    if nxdi.is_real and mutant in ON_A_DEVICE:
        pytest.skip("a rule of graphs that were traced")
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, AttributeError, IndexError, TypeError, ValueError)) as caught:
        play()
    print(caught.type.__name__, str(caught.value).strip().splitlines()[:2])  # with -rP: how each of them fails


def test_one_token_passes_never_use_the_wide_graph() -> None:
    """The rule that costs time, not tokens: where every slot has one token left, the graph of one token runs."""
    backend: NeuronBackend = load_neuron_backend(neuron_config(checkpoint("llama")))
    rows, width = plan.next_rows([Reading(0, (1, 2, 3), 2, 2), Reading(1, (1, 2), 1, 1)], width=GAMMA + 1)
    assert width == 1
    assert [row.slot for row in rows] == [0, 1]
    assert backend.max_pass_tokens == GAMMA + 1
