"""vLLM plug-in: with speculation, a seeded request has the text that it has without.

vLLM's verification compares probabilities of target and draft, so its texts follow from the drafts too. Here the token
of each row is the one that vLLM draws without drafts: the maximum of logits and Gumbel noise of seed and position. A
draft token is accepted if and only if it is that token, and drafts are drawn with the same noise, so that they often
are. All of it stays on the device. vLLM calls `register` in each of its processes, by the entry point
`vllm.general_plugins`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ENABLED, LIMITS = "SAME_TEXT", "SAME_TEXT_LIMITS"
"""Environment variables: the first, at "0", leaves vLLM as it is; the second, at "0", draws drafts without the target's
penalties and truncation."""
log = logging.getLogger("vllm.same_text")


def choose(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Choose tokens in the place of vLLM's `rejection_sample`: those that it draws where there are no drafts.

    Args:
        target_logits: float [num_rows, vocab_size] after bias, penalties, temperature and truncation; the rows of a
            request follow each other.
        draft_sampled: int [num_rows]: a request's last token, then its draft tokens; -1 is no token.
        cu_num_logits: int [num_requests + 1]: first row of each request, and the number of rows.
        pos: int [num_rows]: position of the token before the chosen one.

    Returns:
        Tokens, int64 [num_requests, num_speculative_steps + 1], and how many of each row count, int32 [num_requests].
    """
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    target = (target_logits, expanded_idx_mapping, temperature, seed, pos)
    chosen = gumbel_sample(*target, apply_temperature=False, is_drafting=False, use_fp64=use_fp64)
    last = cu_num_logits[1:, None] - 1
    rows = cu_num_logits[:-1, None] + torch.arange(num_speculative_steps + 1, device=cu_num_logits.device)
    tokens = chosen[torch.minimum(rows, last)]
    accepted = (draft_sampled[torch.minimum(rows + 1, last)] == tokens) & (rows < last)
    return tokens, 1 + accepted[:, :-1].int().cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)


def sample_draft(
    self: Any,
    hidden_states: Tensor,
    sample_src_positions: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_step: Tensor,
    draft_logits: Tensor | None,
    spec_step_idx: int = 0,
    **others: Any,
) -> Tensor:
    """Draw draft tokens, int64 [num_rows], with the target's noise, in the place of a speculator's own `sample_draft`.

    `draft_logits`, vLLM's cache for a ratio of probabilities, stays empty.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits = self.compute_draft_logits(hidden_states, spec_step_idx)
    self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
    logits, is_raw = _limited(self, logits, sample_src_positions, idx_mapping)
    draft = (logits, idx_mapping, temperature, seeds, sample_src_positions)
    return gumbel_sample(*draft, apply_temperature=is_raw, is_drafting=False, use_fp64=self.use_fp64_gumbel)


def _limited(speculator: Any, logits: Tensor, positions: Tensor, idx_mapping: Tensor) -> tuple[Tensor, bool]:
    """Return a draft's logits with the target's bias, penalties, temperature and truncation, and whether none applied.

    Without them the text is the same, and fewer drafts are accepted. A graph records drafts without them, as it would
    record the requests of its capture. Passes with other rows than one for each request, and drafts with a vocabulary
    other than the target's, do without them too.
    """
    held: tuple[Any, Any] = getattr(speculator, "same_text_of", (None, None))
    sampler, batch = held
    if batch is None or len(logits) != len(slots := batch.idx_mapping_np):
        return logits, True
    states = sampler.sampling_states
    if logits.shape[-1] != states.vocab_size or not sampler.needs_logits_processing[slots].any():
        return logits, True
    import torch
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    zeros, lengths = torch.zeros_like(idx_mapping), batch.seq_lens_cpu_upper_bound.numpy()[: len(slots)]
    context = LogitsContext(idx_mapping, idx_mapping, slots, zeros, zeros, positions, lengths)
    logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
    for processor in sampler.logits_processors[:2]:  # bias and penalties; the others may keep a state in `apply`
        logits = processor.apply(logits, context)
    states.apply_temperature(logits, idx_mapping, slots)
    states.apply_min_p(logits, idx_mapping, slots)
    return states.apply_top_k_top_p(logits, idx_mapping, slots), False


def _imitate(speculator: Any, sampler: Any) -> None:
    """Show a speculator the target's sampler, and the requests of a pass while it proposes for them."""
    propose = speculator.propose

    def proposing(input_batch: Any, *arguments: Any, **options: Any) -> Any:
        speculator.same_text_of = (sampler, None if options.get("dummy_run") else input_batch)
        try:
            return propose(input_batch, *arguments, **options)
        finally:
            speculator.same_text_of = (None, None)

    speculator.propose = proposing


@functools.cache  # so that it is done once in a process
def install() -> None:
    """Replace vLLM's verification and its drafts, never one alone: shared noise biases a ratio of probabilities."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler, speculator

    rejection_sampler.rejection_sample = choose
    speculator.DraftModelSpeculator.sample_draft = sample_draft
    load = model_runner.GPUModelRunner.load_model

    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        verifier = self.speculative_config and self.rejection_sampler
        if verifier and type(verifier) is not rejection_sampler.RejectionSampler:
            raise ValueError(f"same_text does not fit a model with a sampler of its own: set {ENABLED}=0")
        if isinstance(self.speculator, speculator.DraftModelSpeculator) and os.environ.get(LIMITS) != "0":
            _imitate(self.speculator, self.sampler)

    model_runner.GPUModelRunner.load_model = load_model


def register() -> None:
    """Install the rule in this process of vLLM, and check each configuration that is made in it."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if os.environ.get(ENABLED) == "0" or create.__module__ == __name__:
        return

    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        _adopt(config := create(self, *arguments, **options))
        return config

    EngineArgs.create_engine_config = create_engine_config
    if not any(unknown()):
        install()


def permit(check: Callable[[Any], None] = lambda params: None) -> None:
    """Allow `min_p` and `logit_bias` beside speculation, which this process of vLLM refuses otherwise.

    Args:
        check: function that raises an error of vLLM for parameters that are still to be refused; by default none are.
    """
    from vllm.sampling_params import SamplingParams

    SamplingParams._validate_spec_decode = lambda self, speculative_config: check(self)


def _adopt(config: Any) -> None:
    """Check a new configuration of vLLM, and allow `min_p` and `logit_bias` beside its speculation; or log why not.

    Raises:
        ValueError: a text could follow from its drafts; the message has the way out.
    """
    if config.speculative_config is None:
        log.info("same_text stands back: no speculation is asked for")
    elif "specdec." in str(config.scheduler_config.scheduler_cls):
        from specdec.inference.vllm.adoption import check_params

        permit(check_params)
        log.info("same_text stands back: specdec's scheduler is configured, and specdec has this rule itself")
    else:
        for fault in faults(config):
            raise ValueError(f"{fault}, or set {ENABLED}=0, and texts follow from the drafts too")
        permit()
        log.info("same_text: seeded texts are those without speculation; %s", "; ".join(notes(config)))


def faults(config: Any) -> Iterator[str]:
    """Yield why a text could follow from its drafts with this configuration of vLLM, each with what to do."""
    asked, missing = config.speculative_config, ", ".join(unknown())
    method, sampling = asked.method, asked.rejection_sample_method
    if missing:
        yield f"same_text does not know this vLLM, which lacks {missing}: update it"
    if not config.use_v2_model_runner:
        yield f"method {method!r} would run on vLLM's runner V1: take what V2 supports, set VLLM_USE_V2_MODEL_RUNNER=1"
    if sampling != "standard":
        yield f"rejection_sample_method {sampling!r} must be 'standard', which same_text replaces"
    if getattr(config, "watermark_config", None):
        yield "a watermark chooses tokens, as same_text does: serve without it"


def notes(config: Any) -> Iterator[str]:
    """Yield what a user should know of this configuration: how equal texts are, and settings without effect."""
    asked, invariant = config.speculative_config, os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    yield "logits are batch-invariant" if invariant else "up to rounding of logits: VLLM_BATCH_INVARIANT=1 ends that"
    if asked.use_local_argmax_reduction:
        yield "use_local_argmax_reduction is not used, since drafts are drawn from whole logits"
    if asked.draft_sample_method == "probabilistic":
        yield "draft_sample_method 'probabilistic' takes memory for logits that are not used"


SAMPLE, SPECULATE = "v1/worker/gpu/sample", "v1/worker/gpu/spec_decode"
DRAFTING, STATES = f"{SPECULATE}/speculator.py:DraftModelSpeculator", f"{SAMPLE}/states.py:SamplingStates"
NAMES: dict[str, str | Callable[..., Any]] = {
    "engine/arg_utils.py:EngineArgs.create_engine_config": "self",
    "sampling_params.py:SamplingParams._validate_spec_decode": "self speculative_config",
    "v1/worker/gpu/model_runner.py:GPUModelRunner.load_model": "self",
    f"{SAMPLE}/gumbel.py:gumbel_sample": "logits expanded_idx_mapping temperature seed pos apply_temperature "
    "is_drafting",
    f"{SAMPLE}/logits_processor/interface.py:LogitsProcessor.apply": "self logits ctx",
    f"{SAMPLE}/logits_processor/interface.py:LogitsContext": "expanded_idx_mapping idx_mapping idx_mapping_np "
    "expanded_local_pos input_ids pos seq_lens_upper_bound_np",
    f"{STATES}.apply_temperature": "self logits expanded_idx_mapping idx_mapping_np",
    f"{STATES}.apply_min_p": "self logits expanded_idx_mapping idx_mapping_np",
    f"{STATES}.apply_top_k_top_p": "self logits expanded_idx_mapping idx_mapping_np",
    f"{SPECULATE}/rejection_sampler.py:rejection_sample": "",
    f"{SPECULATE}/rejection_sampler_utils.py:rejection_sample": choose,
    f"{DRAFTING}.sample_draft": sample_draft,
    f"{DRAFTING}.compute_draft_logits": "self hidden_states spec_step_idx",
    f"{DRAFTING}._maybe_predict_acceptance": "self logits idx_mapping draft_step",
}
"""Files and names of vLLM that this module replaces or calls, with their first parameters, or a function with these."""


def place() -> Path | None:
    """Return the folder of the installed vLLM, without importing it; None if there is none."""
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


def unknown(folder: Path | None = None) -> Iterator[str]:
    """Yield each name in `NAMES` that a vLLM lacks or that has other parameters, as read in its sources.

    Args:
        folder: folder of that vLLM; None: the installed one.
    """
    folder = folder or place() or Path()
    for key, first in NAMES.items():
        file, name = key.split(":")
        wanted = first.split() if isinstance(first, str) else list(inspect.signature(first).parameters)[:-1]
        found = _bound(folder / file).get(name)
        if found is None or found[: len(wanted)] != wanted:
            yield f"{name}({', '.join(wanted)}) in {file}"


@functools.cache
def _bound(file: Path) -> dict[str, list[str]]:
    """Return what a file of vLLM defines and imports: functions with their parameters, classes with their fields."""
    found: dict[str, list[str]] = {}
    queue: list[tuple[str, ast.AST]] = [("", ast.parse(file.read_bytes()))] if file.is_file() else []
    for prefix, parent in queue:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name: [] for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                queue.append((f"{node.name}.", node))
                found[node.name] = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
            elif isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return found
