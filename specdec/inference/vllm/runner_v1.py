"""vLLM's model runner V1: this project forces a token per row (`choice.py`), vLLM chooses and verifies greedily.

It is for a CPU, on which vLLM does not take runner V2, and for what V2 lacks. All private names of
that runner that this project depends on are in this file; `HOOKS` lists them for `hooks.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from specdec.inference.vllm import choice
from specdec.inference.vllm.choice import Span, Winners, crown, names_not_finite
from specdec.inference.vllm.translation import chooses

HOOKS = {
    "vllm.v1.sample.sampler:Sampler": "apply_logits_processors forward",
    "vllm.v1.sample.rejection_sampler:RejectionSampler": "apply_logits_processors forward",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "input_batch requests sampler rejection_sampler "
    "_get_nans_in_logits propose_draft_token_ids",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_reqs num_tokens_no_spec token_ids_cpu",
}
"""Names of vLLM: methods that this module overrides, and attributes that it reads or replaces."""


class WinningSampler(Sampler):
    """Sampler of each request's token in a pass without draft tokens, else of the token after its draft tokens."""

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode=runner.model_config.logprobs_mode)
        self._runner = runner
        self.broken: list[str] = []  # requests without finite logits in the latest pass
        self.last: list[tuple[int, int]] | None = None  # winners of the rows that the verifier asks about, by request

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling_metadata: Any, predict_bonus_token: bool
    ) -> torch.Tensor:
        """Apply vLLM's own processors, then set the logits so that greedy choice takes this project's tokens."""
        logits = super().apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        if predict_bonus_token and self.last is not None:
            return crown(logits, self.last)
        if logits.shape[0] != self._runner.input_batch.num_reqs:
            return logits  # a run that only measures memory
        won = self.winners([()] * logits.shape[0], logits, lambda places: logits[places])
        return crown(logits, [(each.place, each.token_ids[0]) for each in won])

    def winners(self, proposals: Sequence[Sequence[int]], logits: torch.Tensor, rows_of: Any) -> list[Winners]:
        """Choose the tokens of a pass over all requests of the batch; see `choice.winners`.

        Args:
            logits: float [num_rows, vocab_size]: the rows of one request after another. Each request has a row after
                its tokens, and one after each token of its proposal.
        """
        batch, requests = self._runner.input_batch, self._runner.requests
        names = batch.req_ids[: len(proposals)]
        self.broken = names_not_finite(logits, names, [len(proposal) + 1 for proposal in proposals])
        extra_args = [params and params.extra_args for params in (requests[name].sampling_params for name in names)]
        if not any(map(chooses, extra_args)):
            return []
        tokens = (batch.token_ids_cpu[place, : batch.num_tokens_no_spec[place]].tolist() for place in range(len(names)))
        return choice.winners([Span(*each) for each in zip(tokens, proposals, extra_args, strict=True)], rows_of)


class WinningVerifier(RejectionSampler):
    """Verifier of draft tokens: vLLM's greedy one, over logits in which this project has forced the tokens."""

    def __init__(self, sampler: WinningSampler, speculative_config: Any, device: Any) -> None:
        super().__init__(sampler, speculative_config, device)
        self._winning = sampler
        self._last: list[tuple[int, int]] | None = None

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Choose all tokens of the requests that this project samples; accept the draft tokens that equal them."""
        counts = metadata.num_draft_tokens
        if not any(counts):  # a row for each request, in their order
            return self._winning(logits, sampling_metadata)
        if len(counts) != self._winning._runner.input_batch.num_reqs:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        ends = [0, *itertools.accumulate(counts)]  # of the requests' draft tokens
        drafts = [max(0, each) for each in metadata.draft_token_ids.tolist()]  # -1 is vLLM's padding, always rejected
        proposals = [drafts[start:end] for start, end in itertools.pairwise(ends)]
        rows = [range(ends[place] + place, ends[place + 1] + place + 1) for place in range(len(counts))]
        seen = self._processed(metadata, logits, sampling_metadata)
        rows_of = lambda places: seen[[row for place in places for row in rows[place]]]  # noqa: E731
        won = self._winning.winners(proposals, logits, rows_of)
        self._winning.last = [(each.place, each.token_ids[-1]) for each in won]
        self._last = [
            (ends[each.place] + number, token_id) for each in won for number, token_id in enumerate(each.token_ids[:-1])
        ]
        try:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        finally:
            self._winning.last = self._last = None

    def _processed(self, metadata: Any, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        """Return the logits after vLLM's own fields, such as allowed tokens, which this project's choice obeys too."""
        budgets = getattr(sampling_metadata, "thinking_budget_state_holder", None)
        has_budgets = budgets is not None and budgets.has_tracked_requests()
        masks = sampling_metadata.allowed_token_ids_mask
        if masks is None and not sampling_metadata.bad_words_token_ids and not has_budgets:
            return logits
        seen, last, others = logits.float().clone(), metadata.bonus_logits_indices, metadata.target_logits_indices
        seen[last] = Sampler.apply_logits_processors(self._winning, seen[last], sampling_metadata, True)
        seen[others] = super().apply_logits_processors(seen[others], sampling_metadata, metadata)
        return seen

    def apply_logits_processors(self, logits: torch.Tensor, sampling_metadata: Any, metadata: Any) -> torch.Tensor:
        """Force this project's tokens in all rows but each request's last, which `WinningSampler` sets."""
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        return logits if self._last is None else crown(logits, self._last)


def spare_others() -> None:
    """Make requests without an adapter use none on a CPU, where vLLM 0.32 gives them the last adapter of its table.

    Its kernels for other devices skip their index, -1; those for a CPU count it from the end.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def sparing(apply: Any) -> Any:
        def spared(
            inputs: Any, weights: Any, output: torch.Tensor, indices: torch.Tensor, *others: Any, **options: Any
        ) -> None:
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
    """Replace a runner's sampler and verifier by those of this module, once the runner has loaded its model."""
    if runner.device.type == "cpu" and runner.lora_config is not None:
        spare_others()
    runner.sampler = sampler = WinningSampler(runner)
    runner.propose_draft_token_ids = lambda *arguments: []  # the scheduler does, in the core
    runner._get_nans_in_logits = lambda logits: dict.fromkeys(sampler.broken, 1)
    if hasattr(runner, "rejection_sampler"):  # the last rank of a pipeline has one
        runner.rejection_sampler = WinningVerifier(runner.sampler, runner.speculative_config, runner.device)
