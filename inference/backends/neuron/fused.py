"""NxDI's fused speculation: draft, verification and acceptance in one compiled graph.

The graph hands out tokens, not logits, so this is a `Decoder`, not a slot model. Greedy modes are exact. A mode that
samples on the device (EAGLE with do_sample) keeps the target's law, but not the seed: equal seeds need not give equal
tokens, so a seed is refused there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inference.backends.checkpoint import load_config
from inference.backends.neuron.application import Compilation, fused_compilation
from inference.backends.neuron.calls import GREEDY, Row, fused_call, prompt_call
from inference.backends.neuron.checks import check_medusa, check_method, check_pair, check_sharding
from inference.backends.neuron.environment import check_logical_cores
from inference.backends.neuron.settings import fused_arguments
from inference.backends.neuron.shape import SlotShape, slot_shape
from inference.backends.neuron.slots import Application
from inference.backends.support import require_supported_config, resolve_length
from inference.config import ModelConfig
from inference.errors import ConfigError, InternalError, InvalidRequestError
from inference.types import GenerationRequest, SamplingParams, Turn, Verdict

MAX_DEVICE_TOP_K = 256
"""NxDI's global_topk: what on-device sampling looks at, at most."""

_NOTHING = Verdict(token_ids=(), num_draft_tokens=0, num_accepted_tokens=0)


class FusedDecoder:
    """A fused pair and its slots; see `inference.types.Decoder`.

    Args:
        application: loaded.
        shape: what was compiled; its width is K, the tokens that one step commits at most.
        method: for messages.
        samples: whether the graph can do other than greedy.
    """

    def __init__(self, application: Application, shape: SlotShape, *, method: str, samples: bool) -> None:
        self._application = application
        self._shape = shape
        self._method = method
        self._samples = samples
        self._held = [0] * shape.num_slots  # tokens of each slot whose keys and values are in both models

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    @property
    def num_slots(self) -> int:
        return self._shape.num_slots

    @property
    def max_length(self) -> int:
        """Positions that a slot holds, less those that a step may write behind the last valid one."""
        return self._shape.max_length

    @property
    def slot_bytes(self) -> int:
        """Of the target."""
        return self._shape.slot_bytes

    @property
    def seed_invariant(self) -> bool:
        """See `inference.capabilities.LimitedDecoder`."""
        return not self._samples

    @property
    def prompt_chunk_tokens(self) -> int:
        """See `inference.capabilities.LimitedDecoder`: a prompt is read at once."""
        return self._shape.length

    def check(self, request: GenerationRequest) -> None:
        """See `inference.capabilities.LimitedDecoder`."""
        for fault in self._faults(request):
            raise InvalidRequestError(f"{fault}: this server's speculation_method {self._method} cannot do that")

    def _faults(self, request: GenerationRequest) -> Iterator[str]:
        sampling, num_tokens = request.sampling, len(request.prompt_token_ids)
        if num_tokens > self._shape.max_prompt:
            yield f"the prompt has {num_tokens} tokens, the compiled prompt graph reads {self._shape.max_prompt}"
        if not sampling.greedy and not self._samples:
            yield f"temperature {sampling.temperature} (only 0 is greedy)"
        if sampling.penalizes or sampling.logit_bias:
            yield "repetition, presence or frequency penalty, or logit_bias"
        if request.logprobs is not None:
            yield f"logprobs {request.logprobs}"
        if not sampling.greedy and sampling.min_p > 0:
            yield f"min_p {sampling.min_p}"
        if not sampling.greedy and not 1 <= sampling.top_k <= MAX_DEVICE_TOP_K:
            yield f"top_k {sampling.top_k} (it must be 1..{MAX_DEVICE_TOP_K})"

    @torch.no_grad()
    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Read the prompts of new sequences, one by one; take one fused step with all others."""
        verdicts = {turn.slot: _NOTHING for turn in turns}
        wanted = [turn for turn in turns if turn.chooses]
        going_on = sorted((turn for turn in wanted if self._goes_on(turn)), key=lambda turn: turn.slot)
        for turn in wanted:
            if not self._goes_on(turn):
                verdicts[turn.slot] = self._read_prompt(turn)
        if going_on:
            verdicts.update(self._fused_step(going_on))
        return [verdicts[turn.slot] for turn in turns]

    def _goes_on(self, turn: Turn) -> bool:
        """Whether the slot holds all of the turn's tokens but the last."""
        return turn.start > 0 and self._held[turn.slot] == turn.start == len(turn.token_ids) - 1

    def _read_prompt(self, turn: Turn) -> Verdict:
        call = prompt_call(Row(turn.slot, 0, turn.token_ids, _device_sampling(turn.sampling)))
        accepted, _, _, _, *_ = self._application.forward(**call).fused_outputs  # accepted: [1, K]
        self._held[turn.slot] = len(turn.token_ids)
        return Verdict(self._token_ids(accepted[0], 1), num_draft_tokens=0, num_accepted_tokens=0)

    def _fused_step(self, turns: Sequence[Turn]) -> dict[int, Verdict]:
        rows = [_row(turn) for turn in turns]
        outputs = self._application.forward(**fused_call(rows)).fused_outputs
        accepted, _, _, next_positions, *_ = outputs  # [num_rows, K] padded with -1; next_positions: [num_rows, 1]
        ends = next_positions.reshape(-1).tolist()
        return {
            turn.slot: self._verdict(turn, of_row, int(end) - turn.start)
            for turn, of_row, end in zip(turns, accepted, ends, strict=True)
        }

    def _verdict(self, turn: Turn, accepted: torch.Tensor, num_tokens: int) -> Verdict:
        """`num_tokens` counts the target's own token, whose keys and values are not in the slot yet."""
        self._held[turn.slot] = turn.start + num_tokens
        token_ids = self._token_ids(accepted, num_tokens)
        return Verdict(token_ids, num_draft_tokens=self._shape.width - 1, num_accepted_tokens=num_tokens - 1)

    def _token_ids(self, accepted: torch.Tensor, num_tokens: int) -> tuple[int, ...]:
        token_ids = tuple(token_id for token_id in accepted.tolist() if token_id >= 0)
        if len(token_ids) != num_tokens:
            raise InternalError(f"NxDI accepted {accepted.tolist()}, but its next position says {num_tokens} tokens")
        return token_ids


def _row(turn: Turn) -> Row:
    return Row(turn.slot, turn.start, turn.token_ids[-1:], _device_sampling(turn.sampling))


def _device_sampling(sampling: SamplingParams) -> tuple[float, float, float]:
    if sampling.greedy:
        return GREEDY
    return (float(sampling.top_k), sampling.top_p, sampling.temperature)


def load_fused_decoder(target: ModelConfig, draft: ModelConfig) -> FusedDecoder | None:
    """Load a fused pair; compiles it first unless that was done before. None if the method is not a fused one.

    Raises:
        ConfigError: NxDI is not here, or the pair, the method or the settings cannot be used; the message names which.
    """
    if target.neuron.method == "vanilla":
        return None
    compilation, shape = prepare_fused(target, draft)
    sampling = target.neuron.overrides.get("on_device_sampling_config") or {}
    method = target.neuron.method
    return FusedDecoder(compilation.load(), shape, method=method, samples=bool(sampling.get("do_sample")))


def compile_fused_decoder(target: ModelConfig, draft: ModelConfig) -> None:
    """Compile ahead of time what `load_fused_decoder` would load."""
    compilation, _ = prepare_fused(target, draft)
    compilation.compiled()


def prepare_fused(target: ModelConfig, draft: ModelConfig) -> tuple[Compilation, SlotShape]:
    """Check everything, build NxDI's configuration, and say what the compiled pair will be."""
    options = target.neuron
    if options.method == "medusa":
        check_medusa(target)
        raise ConfigError("speculation_method medusa is not served yet: use vanilla, fused, eagle or eagle3")
    check_logical_cores(options.overrides)
    target_words, draft_words = load_config(target.path), load_config(draft.path)
    if target_words.model_type != draft_words.model_type:
        raise ConfigError(
            f"draft {draft.path} is a {draft_words.model_type}, target {target.path} a {target_words.model_type}: "
            "NxDI's fused graph needs one model type: use --speculation_method vanilla"
        )
    length = resolve_length(target_words, target.sequence_length)
    for config, words in ((target, target_words), (draft, draft_words)):
        require_supported_config(words, length)
        check_sharding(config.path, words, config.neuron.tp_degree)
    check_pair(target, draft, target_words, draft_words)
    arguments = fused_arguments(target, length=length)
    check_method(target, draft.path, target_words)
    return fused_compilation(target, draft.path, target_words, arguments), slot_shape(target_words, arguments)
