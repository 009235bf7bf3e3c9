"""vLLM's model runner V1, on which this project's code chooses the tokens; all that V1 alone needs is in this file.

V1 is for a CPU, on which vLLM does not take runner V2, and for what V2 lacks. To vLLM each request is greedy; its
`extra_args` have its sampling parameters. `Choice` chooses a token for each row of logits by them: bias, penalties,
minimum length, truncation and random numbers. It then sets the row so that this token has the highest logit. So vLLM's
greedy choice takes it, and vLLM's greedy verification accepts a draft token that equals it. vLLM itself masks the
tokens that a grammar forbids.

Private names of that runner stand here alone; `HOOKS` lists them for `hooks.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec.inference.engine.target_session import MAX_ADJUSTED_GAMMA
from specdec.inference.model.decoder import Turn
from specdec.inference.model.slots import Array
from specdec.inference.request import GenerationRequest, MinLengthSampling
from specdec.inference.speculation.grammar import allowed_by_grammar
from specdec.inference.speculation.slot_decoder import choose, rows_not_finite
from specdec.inference.vllm.translation import KEY, carried, sampling_fields, sampling_of

if TYPE_CHECKING:
    from torch import Tensor

HOOKS = {
    "vllm.v1.sample.sampler:Sampler": "apply_logits_processors",
    "vllm.v1.sample.rejection_sampler:RejectionSampler": "apply_logits_processors",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "input_batch requests sampler rejection_sampler "
    "_sample _get_nans_in_logits propose_draft_token_ids",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_reqs num_tokens_no_spec token_ids_cpu",
}
"""Names of vLLM: methods that this module wraps or replaces, and attributes that it reads."""


def make_greedy(params: Any) -> None:
    """Turn vLLM's sampling parameters into those of the greedy choice, in place."""
    params.temperature, params.top_k, params.top_p, params.min_p, params.seed = 0.0, 0, 1.0, 0.0, None
    params.presence_penalty, params.frequency_penalty, params.repetition_penalty = 0.0, 0.0, 1.0
    params.logit_bias = None


def extra_args(request: GenerationRequest, name: str, gamma: int) -> dict[str, Any]:
    """Return the `extra_args` with which a request goes to vLLM on runner V1.

    They have the sampling parameters by which this project chooses its tokens; None if plain greedy choice is enough.

    Args:
        name: name of the request in the messages between core and server.
        gamma: most draft tokens of a pass.
    """
    sampling = request.sampling
    adjusts = sampling.penalizes or bool(sampling.logit_bias)
    is_plain = sampling.greedy and not adjusts and not isinstance(sampling, MinLengthSampling)
    ours = {
        **carried(request, name, min(gamma, MAX_ADJUSTED_GAMMA) if adjusts else gamma),
        "sampling": None if is_plain else sampling_fields(sampling),
    }
    return {KEY: ours}


def greedy_fields(request: GenerationRequest, name: str, gamma: int) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams` that a request has on runner V1 only; to vLLM the request is greedy.

    For the arguments see `extra_args`.
    """
    ours = extra_args(request, name, gamma)
    return {"temperature": 0.0, "prompt_logprobs": request.prompt_logprobs, "extra_args": ours}


def chooses(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether this project chooses a request's tokens, and not vLLM's greedy choice.

    It does if `extra_args` have sampling parameters from `extra_args()`.
    """
    ours = None if extra_args is None else extra_args.get(KEY)
    return ours is not None and ours["sampling"] is not None


def faults(config: Any) -> Iterator[str]:
    """Yield each setting in vLLM's configuration that does not go with this choice of tokens, with what to do."""
    if (mode := config.model_config.logprobs_mode) != "raw_logprobs":
        yield f"--logprobs-mode {mode}: take raw_logprobs, since on runner V1 it would show the one token that has won"
    if getattr(config, "watermark_config", None) is not None:
        yield "a watermark is a choice of tokens of vLLM's own: serve without it"


def turn_of(token_ids: Sequence[int], proposal: Sequence[int], extra_args: Mapping[str, Any]) -> Turn:
    """Return what the choice of tokens needs of a request: its tokens so far, its draft tokens, its parameters."""
    ours = extra_args[KEY]
    sampling, start = sampling_of(ours["sampling"]), ours["output_start"]
    return Turn(0, 0, token_ids, sampling, proposal, output_start=start)


def chosen(turns: Sequence[Turn], rows: Array) -> list[list[int]]:
    """Return the chosen tokens of each turn: the one after its tokens so far, and one after each draft token.

    Args:
        rows: float [num_rows, vocab_size]: the logits of one turn after another.
    """
    tokens = iter(choose(rows, [(turn, allowed_by_grammar(turn)) for turn in turns]))
    return [[next(tokens) for _ in (0, *turn.proposal)] for turn in turns]


def names_not_finite(logits: Array, names: Sequence[str], num_rows: Sequence[int]) -> list[str]:
    """Return, for each row of logits that is not finite, the name of the request that it belongs to.

    Args:
        logits: float [sum of num_rows, vocab_size]: the rows of one request after another.
        num_rows: number of rows of each request in `names`.
    """
    if not (broken := rows_not_finite(logits)):
        return []
    owners = [name for name, number in zip(names, num_rows, strict=True) for _ in range(number)]
    return [owners[row] for row in broken]


class Choice:
    """Choice of the tokens of each pass of a runner, which vLLM's sampler and verifier of draft tokens then take.

    Args:
        runner: vLLM's `GPUModelRunner`, which has loaded its model.

    Attributes:
        broken: ids of the requests whose logits were not finite in the latest pass.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._sample = runner, runner._sample
        self._steps = [runner.sampler, runner.rejection_sampler]
        self.broken: list[str] = []
        self._won: Sequence[Sequence[tuple[int, int]]] = [(), ()]  # (row, token) to force in the rows of each step
        for number, step in enumerate(self._steps):
            step.apply_logits_processors = partial(self._force, number, step.apply_logits_processors)

    def _force(self, step: int, processed: Any, *arguments: Any) -> Tensor:
        """Give the chosen tokens the highest logits in the rows that a step of vLLM has processed, within `sample`.

        Args:
            step: 0 for vLLM's sampler, 1 for its verifier of draft tokens.
            processed: the step's own function, which processes logits.
            arguments: arguments of that function.
        """
        logits: Tensor = processed(*arguments)
        if self._won[step]:
            rows, token_ids = (list(column) for column in zip(*self._won[step], strict=True))
            logits[rows] = float("-inf")
            logits[rows, token_ids] = 0.0
        return logits

    def sample(self, logits: Tensor, metadata: Any) -> Any:
        """Choose the tokens of a pass, then let vLLM sample it; in the place of the runner's own `_sample`.

        Args:
            logits: float [num_rows, vocab_size]: for each request of the batch the row after its tokens, and one
                after each of its draft tokens.
            metadata: vLLM's numbers and ids of the draft tokens; None if there are none.
        """
        counts = [] if metadata is None else metadata.num_draft_tokens
        if not any(counts):
            counts, metadata = [0] * self._runner.input_batch.num_reqs, None
        ends = [0, *itertools.accumulate(counts)]  # of the requests' draft tokens
        names = self._runner.input_batch.req_ids[: len(counts)]
        self.broken = names_not_finite(logits, names, [count + 1 for count in counts])
        if turns := self._turns(names, ends, metadata):
            rows = [row for number in turns for row in range(ends[number] + number, ends[number + 1] + number + 1)]
            won = dict(zip(turns, chosen([*turns.values()], self._masked(logits, metadata)[rows]), strict=True))
            last = [(number, tokens[-1]) for number, tokens in won.items()]
            others = [
                (ends[number] + place, token)
                for number, tokens in won.items()
                for place, token in enumerate(tokens[:-1])
            ]
            self._won = last, others
        try:
            return self._sample(logits, metadata)
        finally:
            self._won = (), ()

    def _turns(self, names: Sequence[str], ends: Sequence[int], metadata: Any) -> dict[int, Turn]:
        """Return, by number in the batch, what the choice needs of each request whose tokens this project chooses.

        Args:
            names: vLLM's ids of the requests in the batch.
            ends: 0, then per request the number of draft tokens of the batch up to and including its own.
            metadata: as for `sample`.
        """
        batch, requests, turns = self._runner.input_batch, self._runner.requests, {}
        drafts = [] if metadata is None else metadata.draft_token_ids.tolist()
        for number, name in enumerate(names):
            if chooses(extra := requests[name].sampling_params.extra_args):
                token_ids = batch.token_ids_cpu[number, : batch.num_tokens_no_spec[number]].tolist()
                proposal = [max(0, each) for each in drafts[ends[number] : ends[number + 1]]]  # -1 is vLLM's padding
                turns[number] = turn_of(token_ids, proposal, extra)
        return turns

    def _masked(self, logits: Tensor, metadata: Any) -> Tensor:
        """Return the logits under masks of vLLM's own, such as allowed tokens, which this project's choice obeys."""
        sampling, (sampler, verifier) = self._runner.input_batch.sampling_metadata, self._steps
        budgets = getattr(sampling, "thinking_budget_state_holder", None)
        has_budgets = budgets is not None and budgets.has_tracked_requests()
        if sampling.allowed_token_ids_mask is None and not sampling.bad_words_token_ids and not has_budgets:
            return logits
        seen = logits.float().clone()
        if metadata is None:
            return sampler.apply_logits_processors(seen, sampling, False)
        last, others = metadata.bonus_logits_indices, metadata.target_logits_indices
        seen[last] = sampler.apply_logits_processors(seen[last], sampling, True)
        seen[others] = verifier.apply_logits_processors(seen[others], sampling, metadata)
        return seen


def spare_others() -> None:
    """Patch vLLM 0.32 on a CPU, where requests without a LoRA adapter wrongly get the last adapter of its table.

    Such requests have the adapter index -1, which vLLM's kernels for other devices skip; those for a CPU take it as an
    index from the end.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def sparing(apply: Any) -> Any:
        def spared(inputs: Any, weights: Any, output: Tensor, indices: Tensor, *others: Any, **options: Any) -> None:
            without = (indices < 0).expand(len(output))  # scores of a prompt have one index for all rows
            kept = output[without]
            apply(inputs, weights, output, indices, *others, **options)
            output[without] = kept

        return spared

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        spared = sparing(getattr(lora_ops, name))
        setattr(lora_ops, name, spared)
        setattr(punica_cpu, name, spared)


def install(runner: Any) -> None:
    """Let this project choose the tokens of a runner that has loaded its model; the scheduler gives it draft tokens."""
    if runner.device.type == "cpu" and runner.lora_config is not None:
        spare_others()
    runner.propose_draft_token_ids = lambda *arguments: []
    if hasattr(runner, "rejection_sampler"):  # only the last rank of a pipeline has one, and samples
        choice = Choice(runner)
        runner._sample = choice.sample
        runner._get_nans_in_logits = lambda logits: dict.fromkeys(choice.broken, 1)
