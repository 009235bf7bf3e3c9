"""What a client may ask of a model, tokenized: parameters of the choice, and the request. Owns their ranges."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from inference.errors import InvalidRequestError

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


class Schedule(enum.Enum):
    """Who waits for whom between draft worker and target."""

    SYNC = "sync"  # rounds: draft, send, wait for the verdict
    ASYNC = "async"  # run-ahead: the draft goes on, the target verifies what has arrived or decodes by itself

    @property
    def target_waits(self) -> bool:
        """Whether every pass of the target waits for a proposal."""
        return self is Schedule.SYNC

    @property
    def runs_ahead(self) -> bool:
        """Whether the draft goes on without waiting for verdicts."""
        return self is Schedule.ASYNC


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


def check_logit_bias(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Refuse biases of tokens that do not exist.

    Raises:
        InvalidRequestError: naming the token.
    """
    for token_id, _ in sampling.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequestError(f"logit_bias names token {token_id}, outside the vocabulary of {vocab_size}")
