"""Choice of tokens in vLLM's model runner V2: a public logits processor, and draft tokens written before each pass.

All private names of that runner that this project depends on are in this file; `HOOKS` lists them for `hooks.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from specdec.inference.vllm.choice import Choice, Span, crown
from specdec.inference.vllm.translation import Asked

HOOKS = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "update_requests req_states speculator",
    "vllm.v1.worker.gpu.states:RequestState": "req_id_to_index draft_tokens",
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsContext": "expanded_idx_mapping pos input_ids",
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcRequestState": "all_token_ids prefill_len",
    "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator": "propose",
}
"""Names of vLLM: attributes that this module reads, and methods that it wraps.

The two classes of the logits processor are public.
"""


@dataclass(slots=True)
class _Request:
    """Request in a slot of the runner, with its tokens as far as they have been read from the device."""

    name: str
    extra_args: dict[str, object] | None
    token_ids: list[int] = field(default_factory=list)


class WinningProcessor(LogitsProcessor):
    """Logits processor that forces this project's tokens; vLLM's greedy choice and verification do the rest."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        model = vllm_config.model_config
        self._choice = Choice(Path(model.model), model.get_vocab_size())
        self._states = req_states
        self._requests: dict[int, _Request] = {}  # by slot
        self._names = itertools.count()

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take the request of a slot, new or back after a lack of memory; return whether this project samples it."""
        self._requests.pop(req_idx, None)
        if Asked.read(sampling_params.extra_args) is None:
            return False
        self._requests[req_idx] = _Request(str(next(self._names)), sampling_params.extra_args)
        self._choice.forget({each.name for each in self._requests.values()})
        return True

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Force this project's tokens in float32 logits [num_rows, vocab_size], in place; rows within a prompt stay."""
        columns = (ctx.expanded_idx_mapping, ctx.pos, ctx.input_ids)
        slots, positions, input_ids = torch.stack([each.long() for each in columns]).tolist()
        groups = [list(rows) for _, rows in itertools.groupby(range(len(slots)), key=slots.__getitem__)]
        groups = [rows for rows in groups if self._chooses(slots[rows[0]], positions[rows[0]])]
        self._read({slots[rows[0]]: positions[rows[0]] + 1 for rows in groups})
        spans = []
        for first, *others in groups:
            request = self._requests[slots[first]]
            proposal = [max(0, input_ids[row]) for row in others]  # -1 is vLLM's padding: rejected whatever is chosen
            spans.append(Span(request.name, request.token_ids, proposal, request.extra_args))
        won = self._choice.winners(spans, lambda places: logits[[row for place in places for row in groups[place]]])
        pairs = (zip(groups[each.place], each.token_ids, strict=True) for each in won)
        return crown(logits, list(itertools.chain.from_iterable(pairs)))

    def _chooses(self, slot: int, position: int) -> bool:
        return slot in self._requests and position + 1 >= self._states.prefill_len.np[slot]

    def _read(self, ends: Mapping[int, int]) -> None:
        """Read each slot's new tokens up to its end in `ends`, by one copy for all, since the device waits for it."""
        table = self._states.all_token_ids.gpu  # [num_slots, max_length]
        new = {slot: table[slot, len(self._requests[slot].token_ids) : end] for slot, end in ends.items()}
        token_ids = iter(torch.cat(list(new.values())).tolist() if new else [])
        for slot, part in new.items():
            self._requests[slot].token_ids.extend(itertools.islice(token_ids, len(part)))


def install_choice(runner: Any) -> None:
    """Let the scheduler's draft tokens reach the device before each pass, on every rank of a pipeline.

    The runner has loaded its model, and has `WinningProcessor` already. vLLM's lookup, without which it has no room for
    draft tokens, looks nothing up.
    """
    update = runner.update_requests

    def update_requests(scheduler_output: Any) -> None:
        update(scheduler_output)
        write_drafts(runner.req_states, scheduler_output.scheduled_spec_decode_tokens)

    runner.update_requests = update_requests
    if runner.speculator is not None:  # the last rank of a pipeline has one
        runner.speculator.propose = partial(runner.speculator.propose, dummy_run=True)


def write_drafts(states: Any, drafts: Mapping[str, Sequence[int]]) -> None:
    """Write draft tokens, given by vLLM's request ids, into the runner's `states`; skip vLLM's padding, which is -1."""
    cells = [
        (states.req_id_to_index[name], place, token_id)
        for name, token_ids in drafts.items()
        for place, token_id in enumerate(token_ids)
        if token_id >= 0
    ]
    if cells:
        slots, places, token_ids = torch.tensor(cells).T.to(states.draft_tokens.device, non_blocking=True)
        states.draft_tokens[slots, places] = token_ids
