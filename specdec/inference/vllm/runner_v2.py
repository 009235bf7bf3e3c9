"""vLLM's model runner V2 under the rule of `vllm_same_text`: draft tokens written before each pass, resumed streams.

All private names of that runner that this project depends on are in this file and in `vllm_same_text`; `HOOKS` lists
those of this file for `hooks.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from specdec.inference.vllm.translation import METHOD

HOOKS = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "update_requests req_states speculator speculative_config",
    "vllm.v1.worker.gpu.states:RequestState": "req_id_to_index draft_tokens",
    "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator": "propose",
    "vllm.v1.core.sched.output:NewRequestData": "prompt_token_ids prefill_token_ids sampling_params",
}
"""Names of vLLM: attributes that this module reads or sets, and methods that it wraps."""


def install(runner: Any) -> None:
    """Let a runner write the scheduler's draft tokens to its device before each pass, in the place of vLLM's lookup.

    Runner V2 has room for draft tokens only if vLLM speculates. So vLLM's lookup is configured, and made to look
    nothing up. With another speculator of vLLM's the runner stays as it is.

    Args:
        runner: vLLM's `GPUModelRunner`, which has loaded its model.
    """
    if runner.speculative_config.method != METHOD:
        return
    update = runner.update_requests

    def update_requests(scheduler_output: Any) -> None:
        update(scheduler_output)
        write_drafts(runner.req_states, scheduler_output.scheduled_spec_decode_tokens)

    runner.update_requests = update_requests
    if runner.speculator is not None:  # only the last rank of a pipeline has one
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


def count_output_from(entered: Any, output_start: int) -> None:
    """Let the runner count a resumed request's output from `output_start`, as for a request that it had preempted.

    Penalties and the minimum length then do not depend on where the stream was resumed.

    Args:
        entered: vLLM's `NewRequestData` of a request that enters the runner, whose prompt ends with output.
    """
    params = entered.sampling_params = copy.copy(entered.sampling_params)
    num_moved = len(entered.prompt_token_ids) - output_start
    params.max_tokens += num_moved
    params.min_tokens += num_moved if params.min_tokens else 0
    entered.prompt_token_ids = entered.prompt_token_ids[:output_start]
