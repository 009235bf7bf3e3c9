"""Values that cross layers, and the two protocols a model can implement.

Owns no behaviour beyond validation. Positions and lengths are absolute: position `t` counts from the first prompt
token, so a sequence's prompt occupies positions 0 .. n-1 and its first output token is chosen for position n.
"""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from inference.errors import InvalidRequestError

Array: TypeAlias = Any
"""A numpy array or a torch tensor; functions that take one return the same kind, on the same device."""

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**32 - 1
"""Counts travel as 32 bits."""
MAX_GAMMA = 64
MAX_LOGPROBS = 20
"""Best tokens of a position whose log-probabilities can be asked for."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
"""Tokens of one request that can be given a bias."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one token is chosen from one row of logits.

    Bias and penalties change the logits of every choice. Temperature 0 is greedy and ignores what comes after them.

    Attributes:
        temperature: >= 0; logits are divided by it.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p; in (0, 1], 1 keeps all.
        min_p: keep tokens with at least min_p times the largest probability; in [0, 1], 0 keeps all.
        seed: 64-bit key of the noise.
        repetition_penalty: in (0, 100]; divides positive logits of tokens in prompt or output, multiplies others.
        presence_penalty: in [-2, 2]; subtracted once from tokens in the output.
        frequency_penalty: in [-2, 2]; subtracted from tokens in the output as often as they occur there.
        logit_bias: (token id, bias in [-100, 100]) pairs, added to the logits; every token once.

    Raises:
        InvalidRequestError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature <= 100.0, f"temperature {self.temperature} is outside 0..100")
        _require(0 <= self.top_k <= MAX_COUNT, f"top_k {self.top_k} is outside 0..{MAX_COUNT}")
        _require(0.0 < self.top_p <= 1.0, f"top_p {self.top_p} is outside (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, f"min_p {self.min_p} is outside [0, 1]")
        _require(0 <= self.seed <= MAX_SEED, f"seed {self.seed} is outside 0..{MAX_SEED}")
        penalty = self.repetition_penalty
        _require(0.0 < penalty <= 100.0, f"repetition_penalty {penalty} is outside (0, 100]")
        _require(-2.0 <= self.presence_penalty <= 2.0, f"presence_penalty {self.presence_penalty} is outside [-2, 2]")
        _require(
            -2.0 <= self.frequency_penalty <= 2.0, f"frequency_penalty {self.frequency_penalty} is outside [-2, 2]"
        )
        if self.logit_bias:
            self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        num_biases = len(self.logit_bias)
        _require(num_biases <= MAX_LOGIT_BIASES, f"logit_bias has {num_biases} tokens, the limit is {MAX_LOGIT_BIASES}")
        _require(len(dict(self.logit_bias)) == num_biases, "logit_bias names a token twice")
        for token_id, bias in self.logit_bias:
            _require(token_id >= 0, f"logit_bias names token {token_id}, which is below 0")
            _require(-100.0 <= bias <= 100.0, f"logit_bias {bias} of token {token_id} is outside [-100, 100]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on the tokens before it beyond the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token was committed
    LENGTH = "length"  # max_new_tokens or the context limit was reached


class Schedule(enum.Enum):
    """Who waits for whom between draft worker and target."""

    SYNC = "sync"  # rounds: draft, send, wait for the verdict
    ASYNC = "async"  # run-ahead: the draft goes on, the target verifies what has arrived or decodes by itself


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, already tokenized.

    Attributes:
        prompt_token_ids: at least one token id.
        max_new_tokens: upper limit of output tokens, >= 1; generation also ends where the context is full.
        stop_token_ids: the sequence ends after committing any of these.
        stop_at_eos: it also ends after any end-of-sequence token of the target.
        gamma: speculation length asked for by the client; None leaves it to the server, 0 switches speculation off.
        schedule: None leaves it to the server.
        num_committed_tokens: how many of the prompt's last tokens are output of an earlier stream (resume).
        logprobs: with each token its log-probability, and those of so many best ones; None asks for none.

    Raises:
        InvalidRequestError: a value is outside its range.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    stop_token_ids: frozenset[int] = frozenset()
    stop_at_eos: bool = False
    gamma: int | None = None
    schedule: Schedule | None = None
    num_committed_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        num_prompt_tokens = len(self.prompt_token_ids)
        _require(num_prompt_tokens >= 1, "the prompt has no token")
        limit = self.max_new_tokens
        _require(1 <= limit <= MAX_COUNT, f"max_new_tokens {limit} is outside 1..{MAX_COUNT}")
        _require(self.gamma is None or 0 <= self.gamma <= MAX_GAMMA, f"gamma {self.gamma} is outside 0..{MAX_GAMMA}")
        num_stops = len(self.stop_token_ids)
        _require(num_stops <= MAX_STOP_TOKEN_IDS, f"{num_stops} stop_token_ids exceed {MAX_STOP_TOKEN_IDS}")
        _require(
            0 <= self.num_committed_tokens < num_prompt_tokens,
            f"num_committed_tokens {self.num_committed_tokens} is not below the prompt's {num_prompt_tokens} tokens",
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"logprobs {self.logprobs} is outside 0..{MAX_LOGPROBS}",
        )

    @property
    def output_start(self) -> int:
        """Position of the first output token, which a resume does not move."""
        return len(self.prompt_token_ids) - self.num_committed_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its log-probability.

    Attributes:
        logprob: natural logarithm of its probability under the model's raw logits: before bias, penalties, temperature
            and truncation.
        text: the token's bytes; empty until someone with a tokenizer fills them in.
    """

    token_id: int
    logprob: float
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token of one position, and the best ones there, best first.

    Attributes:
        num_characters: of text that became certain with the chosen token, even if a stop string holds them back; 0
            until someone with a tokenizer says. Its bytes cannot tell: a special token's are a name, and no text.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    num_characters: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one commit went, in microseconds, and what it cost; what is not known here is 0.

    Attributes:
        queue_us: from the moment the target could have begun to the start of its pass.
        compute_us: the target's pass, including the choice of tokens.
        draft_us: the draft model's work on the proposal, and its wait for a place in the draft's passes.
        network_us: sending and receiving, as the draft worker sees it.
        bytes_up, bytes_down: messages of this round from draft worker to target, and back.
        num_branch_hits: 1 if the target left the draft's chain for one of its branches.
        num_wasted_tokens: draft tokens that were dropped.
        round_trip_us: present estimate of the way to the target and back.
        window: how far the draft may run ahead from here, in draft tokens.
        max_branches: how many branches it may keep beside its chain from here.
    """

    queue_us: int = 0
    compute_us: int = 0
    draft_us: int = 0
    network_us: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    num_branch_hits: int = 0
    num_wasted_tokens: int = 0
    round_trip_us: int = 0
    window: int = 0
    max_branches: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that became final in one target pass.

    Attributes:
        position: absolute position of the first of them.
        token_ids: ids in order; empty only in a last commit that says nothing but why the sequence ended.
        num_draft_tokens: draft tokens that the pass verified.
        num_accepted_tokens: how many of those were accepted.
        timings: of the pass and the round that led to it.
        finish_reason: set on the last commit of a sequence.
        logprobs: one per token, if the request asked for them.
        num_received_tokens: draft tokens that have come from the draft worker so far; 0: none since the last commit.
        hold_us: microseconds since the last of them came.
    """

    position: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    timings: Timings = Timings()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_received_tokens: int = 0
    hold_us: int = 0


class Generator(Protocol):
    """Anything that turns a request into committed tokens: an engine, or a draft worker with a remote target."""

    @property
    def max_length(self) -> int:
        """Tokens that prompt and output may have together."""

    @property
    def vocab_size(self) -> int: ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """Yield commits until one has a finish_reason; closing the iterator frees the request's slot."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence, to be run through a model in one pass.

    Attributes:
        slot: the sequence's KV room, 0 <= slot < num_slots.
        start: absolute position of the first token; everything before it must have been written to the slot.
        token_ids: one or more ids.
        num_logits: for how many of the last tokens logits are wanted, 0 <= num_logits <= len(token_ids).
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int


class Backend(Protocol):
    """A model over slots and positions.

    Writing at a position overwrites what was there, and nothing past the end of a span is visible to it. So rolling
    back a slot is "start earlier next time", and reusing a slot is "start at 0".
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Positions that a slot holds."""

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot's keys and values, in bytes."""

    def forward(self, spans: Sequence[Span]) -> Array:
        """Run one pass over spans of distinct slots.

        Returns:
            float32 logits [sum of num_logits, vocab_size]: the rows of the first span, then those of the second, ...
            Row i of a span's last `num_logits` tokens is the distribution of the token that follows it.
        """


@dataclass(frozen=True, slots=True)
class Turn:
    """What one sequence wants from one target pass.

    Attributes:
        slot: the sequence's KV room.
        start: how many positions of the sequence the slot holds already.
        token_ids: the committed tokens up to where they are to be written now. Their end is the sequence's end, unless
            the turn is a part of a longer prompt. Not changed while the pass runs.
        sampling: how tokens are chosen.
        proposal: draft tokens to verify behind them; empty for plain decoding.
        gamma: draft tokens that a decoder with a draft of its own may add where the proposal is empty.
        chooses: False for a part of a prompt that ends before its last token: nothing is chosen.
        output_start: position of the sequence's first output token; penalties tell prompt and output apart by it.
        logprobs: as in `GenerationRequest`.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    proposal: Sequence[int] = ()
    gamma: int = 0
    chooses: bool = True
    output_start: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of one turn.

    Attributes:
        token_ids: the tokens it commits: accepted draft tokens, then one of its own.
        num_draft_tokens: draft tokens it verified.
        num_accepted_tokens: how many of them it accepted.
        draft_us: microseconds that the decoder's own draft took.
        logprobs: one per token, if the turn asked for them.
    """

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    draft_us: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Decoder(Protocol):
    """Takes turns of several sequences through one step; runs on the model thread."""

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        """Return one verdict per turn, in order; a turn that does not choose gets no tokens."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain that a proposer is asked to extend.

    Attributes:
        slot: the sequence's room in the draft model.
        token_ids: committed tokens followed by those drafted so far.
        sampling: how the target will choose.
        limit: how many tokens are wanted at most, >= 1.
        output_start: as in `Turn`.
        source_slot: another slot that may hold more of the same tokens, and can be copied from.
    """

    slot: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    limit: int
    output_start: int = 0
    source_slot: int | None = None


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token as a draft model chose it.

    Attributes:
        runner_up: what it would have chosen next, under the same noise; None if it was not asked.
        margin: by how much the token's score exceeds the runner-up's: logits, or log-probabilities with noise.
    """

    token_id: int
    runner_up: int | None = None
    margin: float = math.inf


class Proposer(Protocol):
    """Extends chains of draft tokens; runs on a model thread."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Longest chain, committed tokens included, that can be extended by one."""

    def extend(self, drafts: Sequence[Draft]) -> list[list[int] | None]:
        """Take one step for every draft.

        Returns:
            Per draft, its next 1 .. limit tokens; an empty list if there is nothing to propose; None if the step was
            spent on reading a part of a long prompt, and more steps are needed.
        """
